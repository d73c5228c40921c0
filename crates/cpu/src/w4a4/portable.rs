//! Any processor: the layout in plain Rust.

use castiron_num::{fp4, fp8};

use super::layout::{self, BIAS, Exponents, Inputs, LANES, QUARTERS, SPAN, Weights};
use super::tiles::{Decoded, Form, InputRows, Source};
use crate::matrix::GROUP;

/// Needs nothing.
#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Form for Portable {
    type Weights = Weights;
    const ZERO: Weights = Weights::ZERO;
    const ROWS: usize = 1;

    fn decode(
        self,
        spans: usize,
        w: Source<'_>,
        first: usize,
        out: &mut [Weights],
        exponents: &mut [Exponents],
    ) {
        for (i, (out, exponents)) in out.chunks_exact_mut(spans).zip(exponents).enumerate() {
            let w = w.row(first + i);
            *exponents = w.exponents();
            for (out, (codes, scales)) in out.iter_mut().zip(w.codes.iter().zip(w.scales)) {
                decode_span(codes, scales, *exponents, out);
            }
            if let Some((codes, scales)) = w.rest() {
                decode_span(&codes, &scales, *exponents, &mut out[spans - 1]);
            }
        }
    }

    fn strip<const N: usize>(
        self,
        spans: usize,
        w: Decoded<'_, Weights>,
        x: InputRows<'_, N>,
        out: &mut [[f32; N]],
    ) {
        for ((w, out), exponents) in w.spans.chunks_exact(spans).zip(out).zip(w.exponents) {
            *out = x.finish(*exponents, x.spans.map(|x| dot(w, exponents.narrow(), x)));
        }
    }

    fn stream<const N: usize>(self, w: Source<'_>, first: usize, x: InputRows<'_, N>, out: &mut [[f32; N]]) {
        let spans = x.spans[0].len();
        let mut row = vec![Weights::ZERO; spans];
        let mut exponents = [Exponents::default()];
        for (i, out) in out.iter_mut().enumerate() {
            self.decode(spans, w, first + i, &mut row, &mut exponents);
            let w = Decoded { spans: &row, exponents: &exponents };
            self.strip(spans, w, x, std::slice::from_mut(out));
        }
    }
}

fn decode_span(codes: &[u8; SPAN / 2], scales: &[u8; LANES], exponents: Exponents, out: &mut Weights) {
    for (group, lane) in layout::LANE.into_iter().enumerate() {
        for i in 0..GROUP {
            let code = codes[(group * GROUP + i) / 2] >> (i % 2 * 4);
            out.codes[layout::quarter(i)][4 * lane + layout::byte(i)] =
                (i16::from(fp4::halves(code)) + BIAS) as u8;
        }
        // A checkpoint's scales are checked to be non-negative numbers when it is opened.
        let units = fp8::scale_units(scales[group]).unwrap_or(0) >> exponents.shift;
        out.scales[lane] = if exponents.narrow() { units << 16 | units } else { units };
    }
}

/// The sum of one decoded row with one activation row.
fn dot(w: &[Weights], narrow: bool, x: &[Inputs]) -> i64 {
    w.iter().zip(x).map(|(w, x)| span_dot(w, narrow, x)).sum()
}

/// The term of one span.
#[inline(always)]
fn span_dot(w: &Weights, narrow: bool, x: &Inputs) -> i64 {
    let mut dots = [0i32; LANES];
    for q in 0..QUARTERS {
        for (lane, dot) in dots.iter_mut().enumerate() {
            for j in 4 * lane..4 * lane + 4 {
                *dot += i32::from(w.codes[q][j]) * i32::from(x.codes[q][j]);
            }
        }
    }
    let mut sum = 0;
    for lane in 0..LANES {
        let term = (dots[lane] + i32::from(x.correction[lane][0])) * i32::from(x.multiplier[lane][0]);
        sum += i64::from(term) * i64::from(if narrow { w.scales[lane] >> 16 } else { w.scales[lane] });
    }
    sum
}
