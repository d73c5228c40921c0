//! Encoders of bands of rows. All rounding is `castiron_num`'s; scale choices are in `docs/formats.md`.

use castiron_format::safetensors::Dtype;
use castiron_format::{FP8_BLOCK, NVFP4_GROUP};
use castiron_num::{bf16, fp4, fp8, nvfp4};

use crate::report::Tally;

/// The largest magnitude; 0 for none.
pub(crate) fn amax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |m: f32, v| m.max(v.abs()))
}

/// The FP8 scale of weights up to `amax`: `amax / 448` in the stored type, 1 where that would be zero.
pub(crate) fn fp8_scale(amax: f32, stored: Dtype) -> f32 {
    let scale = amax / fp8::MAX;
    let scale = if stored == Dtype::Bf16 { bf16::round(scale) } else { scale };
    if scale == 0.0 { 1.0 } else { scale }
}

/// The tensor scale of an NVFP4 matrix: `amax / (6 * 448)`, 1 where that would be zero.
pub(crate) fn nvfp4_scale(amax: f32) -> f32 {
    let scale = amax / (fp4::MAX * fp8::MAX);
    if scale == 0.0 { 1.0 } else { scale }
}

/// Encodes `values` under one scale, appending codes. Returns whether every code is zero.
pub(crate) fn fp8_run(values: &[f32], scale: f32, codes: &mut Vec<u8>, tally: &mut Tally) -> bool {
    let mut zero = true;
    for &value in values {
        let quotient = value / scale;
        let code = fp8::encode(quotient);
        zero &= code & 0x7F == 0;
        tally.clipped += u64::from(quotient.abs() > fp8::MAX);
        tally.weight(value, fp8::decode(code) * scale);
        codes.push(code);
    }
    zero
}

/// A band of at most 128 rows of a block-FP8 matrix: appends its codes and one row of block scales.
pub(crate) fn fp8_band(
    values: &[f32],
    cols: usize,
    stored: Dtype,
    codes: &mut Vec<u8>,
    scales: &mut Vec<f32>,
    tally: &mut Tally,
) {
    let width = cols.div_ceil(FP8_BLOCK);
    let mut peaks = vec![0.0f32; width];
    for row in values.chunks_exact(cols) {
        for (peak, part) in peaks.iter_mut().zip(row.chunks(FP8_BLOCK)) {
            *peak = peak.max(amax(part));
        }
    }
    let first = scales.len();
    scales.extend(peaks.iter().map(|&peak| fp8_scale(peak, stored)));
    let mut zero = vec![true; width];
    for row in values.chunks_exact(cols) {
        for ((part, &scale), zero) in row.chunks(FP8_BLOCK).zip(&scales[first..]).zip(&mut zero) {
            *zero &= fp8_run(part, scale, codes, tally);
        }
    }
    zero.into_iter().for_each(|z| tally.block(z));
}

/// Rows of an FP8 matrix with one f32 scale a row: appends codes and scales.
pub(crate) fn fp8_rows(
    values: &[f32],
    cols: usize,
    codes: &mut Vec<u8>,
    scales: &mut Vec<f32>,
    tally: &mut Tally,
) {
    for row in values.chunks_exact(cols) {
        let scale = fp8_scale(amax(row), Dtype::F32);
        scales.push(scale);
        let zero = fp8_run(row, scale, codes, tally);
        tally.block(zero);
    }
}

/// Rows of an NVFP4 matrix (columns a multiple of 16) under the tensor scale `scale_2`: appends packed codes and E4M3
/// block scales. `values` are finite.
pub(crate) fn nvfp4_rows(
    values: &[f32],
    scale_2: f32,
    codes: &mut Vec<u8>,
    scales: &mut Vec<u8>,
    tally: &mut Tally,
) {
    for group in values.as_chunks::<NVFP4_GROUP>().0 {
        // Finite values and a positive scale: it cannot fail.
        let (scale, packed) = nvfp4::quantise_group(group, scale_2).unwrap_or((0, [0; NVFP4_GROUP]));
        let step = fp8::decode(scale) * scale_2;
        let limit = fp4::MAX * step;
        for (&value, &code) in group.iter().zip(&packed) {
            tally.clipped += u64::from(value.abs() > limit);
            tally.weight(value, fp4::decode(code) * fp8::decode(scale) * scale_2);
        }
        tally.block(packed.iter().all(|code| code & 7 == 0));
        scales.push(scale);
        codes.extend(packed.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_of_nothing_are_one() {
        assert_eq!(fp8_scale(0.0, Dtype::Bf16), 1.0);
        assert_eq!(nvfp4_scale(0.0), 1.0);
        assert_eq!(fp8_scale(f32::from_bits(1), Dtype::F32), 1.0);
        assert_eq!(fp8_scale(448.0, Dtype::F32), 1.0);
        assert_eq!(fp8_scale(449.0, Dtype::Bf16), 1.0, "rounded to the stored type first");
        assert!(fp8_scale(449.0, Dtype::F32) > 1.0);
    }

    #[test]
    fn a_zero_group_has_zero_codes_and_no_error() {
        let (mut codes, mut scales, mut tally) = (Vec::new(), Vec::new(), Tally::default());
        nvfp4_rows(&[0.0; 16], 1.0, &mut codes, &mut scales, &mut tally);
        assert_eq!((codes, scales), (vec![0; 8], vec![0]));
        assert_eq!((tally.zero_blocks, tally.max_abs), (1, 0.0));
    }
}
