//! The tiny checkpoint that ships with the program.

use castiron_format::Source;

use crate::failure::Failure;

#[cfg(feature = "embed-tiny")]
macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../../assets/tiny/", $name)))),*]
    };
}

#[cfg(feature = "embed-tiny")]
static FILES: &[(&str, &[u8])] = files![
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// Compiled in.
#[cfg(feature = "embed-tiny")]
#[allow(clippy::unnecessary_wraps, reason = "the other build can fail")]
pub fn source() -> Result<Source, Failure> {
    Ok(Source::Memory(FILES))
}

/// Read from `assets/tiny`, here or beside the program.
#[cfg(not(feature = "embed-tiny"))]
pub fn source() -> Result<Source, Failure> {
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("assets/tiny")));
    let places = [Some(std::path::PathBuf::from("assets/tiny")), beside];
    places.into_iter().flatten().find(|p| p.join("config.json").is_file()).map(Source::Dir).ok_or_else(|| {
        Failure::input(anyhow::anyhow!(
            "no checkpoint was named and this build has none inside: name a directory, run from the folder that \
             holds assets/tiny, or build with default features"
        ))
    })
}
