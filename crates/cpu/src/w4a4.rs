//! NVFP4 weights times NVFP4 activations: exact integers, rounded once.

use castiron_num::nvfp4::{self, QuantisedRow};

use crate::level::for_level;
use crate::matrix::GROUP;
use crate::{Level, Matrix};

/// Quantised input rows of a W4A4 product, with the static activation scale they were made with.
pub struct W4a4Input {
    rows: Vec<QuantisedRow>,
    scale: f32,
}

impl W4a4Input {
    /// Quantises `x` (`[rows, cols]`) with the activation scale `scale`.
    ///
    /// Also gives the rows that hold a value that is not finite, ascending; they are quantised as zeros, and
    /// their outputs mean nothing.
    pub fn quantise(x: &[f32], cols: usize, scale: f32) -> (Self, Vec<usize>) {
        let (mut rows, mut bad) = (Vec::with_capacity(x.len() / cols), Vec::new());
        for (r, x) in x.chunks_exact(cols).enumerate() {
            let mut row = QuantisedRow::default();
            if nvfp4::quantise_row(x, scale, &mut row).is_err() {
                bad.push(r);
                row = QuantisedRow { codes: vec![0; cols], scales: vec![0; cols / GROUP] };
            }
            rows.push(row);
        }
        (Self { rows, scale }, bad)
    }
}

/// `y[r, n]` of the quantised rows with an NVFP4 matrix. False, and nothing written, for other matrices.
pub fn product_w4a4(level: Level, w: &Matrix, x: &W4a4Input, y: &mut [f32]) -> bool {
    exact(level, w, x, y)
}

for_level! {
    fn exact(w: &Matrix, x: &W4a4Input, y: &mut [f32]) -> bool = exact_body;
}

#[inline(always)]
fn exact_body(w: &Matrix, x: &W4a4Input, y: &mut [f32]) -> bool {
    let mut halves = vec![0i8; w.cols()];
    let mut units = vec![0u32; w.cols() / GROUP];
    for n in 0..w.rows() {
        if !w.decode_row_exact(n, &mut halves, &mut units) {
            return false;
        }
        for (row, y) in x.rows.iter().zip(y.chunks_exact_mut(w.rows())) {
            let sum = nvfp4::dot_exact(&row.codes, &row.scales, &halves, &units);
            y[n] = nvfp4::finish(sum, x.scale, w.output_scale());
        }
    }
    true
}
