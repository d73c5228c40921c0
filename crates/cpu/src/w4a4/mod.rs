//! NVFP4 weights times NVFP4 activations: exact integers, rounded once.
//!
//! The sum is exact, so every order, tile and split gives the law's bytes. Weights stay in the checkpoint's
//! nibbles: a tile of weight rows is decoded into cache-sized scratch and used for all rows of a call.

#![allow(clippy::needless_range_loop, reason = "loops over lanes index several arrays in step")]

use std::ops::Range;

use castiron_num::fp8;
use castiron_num::nvfp4::{self, QuantisedRow};

use crate::level::Set;
use crate::matrix::GROUP;
use crate::{Level, Matrix, Pool, Storage};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod layout;
mod portable;
mod quantise;
#[cfg(test)]
mod tests;
mod tiles;

#[cfg(target_arch = "x86_64")]
use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use avx512::Avx512;
use layout::{Exponents, Inputs, SPAN};
use portable::Portable;
use tiles::{Output, Source};

/// Quantised input rows of a W4A4 product, with the static activation scale they were made with.
pub struct W4a4Input {
    /// `[rows, cols / 128 rounded up]`.
    packed: Vec<Inputs>,
    /// E4M3 codes, `[rows, cols / 16]`; the law's form is made from them and `packed`.
    scales: Vec<u8>,
    /// Of every row.
    exponents: Vec<Exponents>,
    rows: usize,
    cols: usize,
    scale: f32,
}

impl W4a4Input {
    /// Quantises `x` (`[rows, cols]`) with the activation scale `scale`.
    ///
    /// Also gives the rows that hold a value that is not finite, ascending; they are quantised as zeros, and
    /// their outputs mean nothing.
    ///
    /// # Panics
    /// When `cols` is 0 or not a multiple of 16.
    pub fn quantise(x: &[f32], cols: usize, scale: f32) -> (Self, Vec<usize>) {
        assert!(cols.is_multiple_of(GROUP), "a row in NVFP4 has whole groups of 16");
        let rows = x.len() / cols;
        let mut packed = vec![Inputs::ZERO; rows * cols.div_ceil(SPAN)];
        let mut scales = vec![0; rows * (cols / GROUP)];
        let mut exponents = vec![Exponents::default(); rows];
        let bad = quantise::rows(Level::detect(), x, cols, scale, (&mut packed, &mut scales, &mut exponents));
        (Self { packed, scales, exponents, rows, cols, scale }, bad)
    }

    /// Row `r` as the law writes it.
    fn natural(&self, r: usize) -> QuantisedRow {
        let (groups, spans) = (self.cols / GROUP, self.cols.div_ceil(SPAN));
        let scales = &self.scales[r * groups..(r + 1) * groups];
        let packed = &self.packed[r * spans..(r + 1) * spans];
        QuantisedRow {
            codes: (0..self.cols)
                .map(|i| layout::half(packed, i, scales[i / GROUP], self.exponents[r]))
                .collect(),
            scales: scales.iter().map(|&s| fp8::scale_units(s).unwrap_or(0)).collect(),
        }
    }
}

/// `y[r, n]` of the quantised rows with an NVFP4 matrix. False, and nothing written, for other matrices.
///
/// # Panics
/// When `x` has not the columns of `w`, or `y` is not `[rows, w.rows()]`.
pub fn product_w4a4(level: Level, w: &Matrix, x: &W4a4Input, y: &mut [f32]) -> bool {
    prepare(w, x, y).is_some_and(|(source, y)| {
        part(level, w, source, 0..w.rows(), x, &y);
        true
    })
}

/// [`product_w4a4`] by all threads of a pool, each with its own outputs; the bytes are the same.
///
/// # Panics
/// As [`product_w4a4`].
pub fn product_w4a4_pooled(level: Level, pool: &Pool, w: &Matrix, x: &W4a4Input, y: &mut [f32]) -> bool {
    prepare(w, x, y).is_some_and(|(source, y)| {
        pool.split(w.rows(), GRAIN, |range| part(level, w, source, range, x, &y));
        true
    })
}

/// Outputs handed to a thread at a time: whole cache lines of `y`.
const GRAIN: usize = 16;

fn prepare<'a>(w: &'a Matrix, x: &W4a4Input, y: &'a mut [f32]) -> Option<(Source<'a>, Output<'a>)> {
    let source = Source::new(w)?;
    assert_eq!(w.cols(), x.cols, "operands of a product have one length");
    Some((source, Output::new(y, x.rows, w.rows())))
}

/// Writes the columns `outputs`, and no other.
fn part(level: Level, w: &Matrix, source: Source<'_>, outputs: Range<usize>, x: &W4a4Input, y: &Output<'_>) {
    match level.0 {
        Set::Law => law(w, outputs, x, y),
        Set::Portable => tiles::product(Portable, source, outputs, x, y),
        #[cfg(target_arch = "x86_64")]
        Set::Avx2 => tiles::product(Avx2::of(level), source, outputs, x, y),
        #[cfg(target_arch = "x86_64")]
        Set::Avx512 => match Avx512::detect(level) {
            Some(form) => tiles::product(form, source, outputs, x, y),
            None => tiles::product(Avx2::of(level), source, outputs, x, y),
        },
    }
}

/// The definition.
fn law(w: &Matrix, outputs: Range<usize>, x: &W4a4Input, y: &Output<'_>) {
    let rows: Vec<QuantisedRow> = (0..x.rows).map(|r| x.natural(r)).collect();
    let (mut halves, mut units) = (vec![0i8; w.cols()], vec![0u32; w.cols() / GROUP]);
    for n in outputs {
        w.decode_row_exact(n, &mut halves, &mut units);
        for (r, row) in rows.iter().enumerate() {
            let sum = nvfp4::dot_exact(&halves, &units, &row.codes, &row.scales);
            // SAFETY: r and n are inside, and nobody else has column n.
            let y = unsafe { y.part(r, n, 1) };
            y[0] = nvfp4::finish(sum, x.scale, w.output_scale());
        }
    }
}
