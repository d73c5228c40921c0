//! The one documented switch for looking inside a forward pass: structured traces, not prints.

/// Receives intermediate values of [`crate::Model::forward_traced`], in the order they are made.
///
/// Every array covers all rows of the call, row-major. `layer` is the zero-based layer, or `None` outside
/// the layers. Names: `embed`, `attn_hc.mixed`, `attn_hc.inject`, `mlp_hc.mixed`, `gdn.out`, `attn.out`,
/// `moe.logits`, `moe.weights`, `moe.out`, `ple.emb`, `ple.out`, `out` (the wide residual), `final`; ids:
/// `moe.experts`, `ple.rows`; and `qsa.tokens`, once a row.
pub trait Trace {
    /// Float rows, `data.len() / rows` values each.
    fn floats(&mut self, layer: Option<usize>, name: &'static str, data: &[f32]);
    /// Integer rows.
    fn ids(&mut self, layer: Option<usize>, name: &'static str, data: &[u64]);
    /// Whether anybody listens; when not, nothing is converted.
    fn wanted(&self) -> bool {
        true
    }
}

/// Listens to nothing.
pub struct NoTrace;

impl Trace for NoTrace {
    fn floats(&mut self, _: Option<usize>, _: &'static str, _: &[f32]) {}
    fn ids(&mut self, _: Option<usize>, _: &'static str, _: &[u64]) {}
    fn wanted(&self) -> bool {
        false
    }
}
