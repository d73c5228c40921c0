//! Text in, text out: everything between a chat request and token ids, and back.
//!
//! * [`Tokenizer`] turns text into ids exactly as the checkpoint's `tokenizer.json` says, and ids into raw bytes.
//! * [`Detokenizer`] turns a stream of ids into a stream of text that never splits a character.
//! * [`ChatTemplate`] renders the checkpoint's own Jinja chat template the way Hugging Face `transformers` does.
//! * [`ReasoningSplit`] separates the think block of a reply from its content while it streams.
//! * [`StopStrings`] ends a reply at the first stop string without ever showing a piece of it.
//!
//! # How the pieces meet
//!
//! ```text
//! messages --ChatTemplate--> prompt text --Tokenizer(Specials::Parse)--> ids --> model
//! model --> ids --Detokenizer--> text --ReasoningSplit--> reasoning | content --StopStrings--> client
//! ```
//!
//! Every stage is a function of the whole stream: how the stream was cut into pushes never shows in what comes
//! out, only in when it comes out. Every stage is linear in the length of the reply, and the detokeniser and the
//! matcher count the bytes they look at so that tests can check it.
//!
//! # Two kinds of text
//!
//! Text that a template wrote may contain control tokens (`<|im_start|>`), and they must become single ids:
//! [`Specials::Parse`]. Text that a user typed must not be able to end a turn or open another:
//! [`Specials::Text`]. Note that a chat template pastes user text into the prompt *before* tokenisation, so for
//! chats the protection has to happen earlier; see [`Tokenizer::special_in_text`].
//!
//! The crate reads no files and no environment, keeps no global state, and stands alone in the workspace.

mod detok;
mod error;
mod reasoning;
mod stops;
mod template;
mod tokenizer;

pub use detok::{Detokenizer, Utf8Stream};
pub use error::{Error, TemplateLimit};
pub use reasoning::{Pieces, ReasoningSplit, ThinkClose};
pub use stops::StopStrings;
pub use template::{
    ChatTemplate, Limits, Message, PrefixBreak, ReasoningEffort, RenderOptions, prefix_break,
};
pub use tokenizer::{Specials, Tokenizer};
