//! Weight matrices as they lie in a checkpoint, decoded a row at a time.

use std::sync::Arc;

use castiron_num::{bf16, fp4, fp8};

/// Bytes of a weight, owned or mapped, alive as long as anyone holds them.
pub type Codes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// How the elements of a [`Matrix`] are stored, row-major.
#[derive(Clone)]
pub enum Storage {
    /// Little-endian binary32.
    F32(Codes),
    /// Little-endian bf16.
    Bf16(Codes),
    /// E4M3FN codes with one f32 multiplier for each 128x128 block; `scales` is
    /// `[ceil(rows / 128), ceil(cols / 128)]`.
    Fp8Block {
        /// `[rows, cols]` codes.
        codes: Codes,
        /// Block multipliers, row-major.
        scales: Arc<[f32]>,
    },
    /// E4M3FN codes with one f32 multiplier for each row, applied to the finished dot product.
    Fp8Row {
        /// `[rows, cols]` codes.
        codes: Codes,
        /// `[rows]`.
        scales: Arc<[f32]>,
    },
    /// Two E2M1 codes a byte (even column in the low nibble), one E4M3 scale for 16 columns, one f32 for
    /// all.
    Nvfp4 {
        /// `[rows, cols / 2]` bytes.
        codes: Codes,
        /// `[rows, cols / 16]` E4M3 codes.
        scales: Codes,
        /// The tensor scale, applied last.
        tensor_scale: f32,
    },
}

/// `fp8::decode` in operations that vectorise.
#[inline(always)]
fn e4m3(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7F);
    let normal = f32::from_bits((magnitude << 20) + (120 << 23));
    let value = if magnitude < 8 { magnitude as f32 * (1.0 / 512.0) } else { normal };
    let value = if magnitude == 0x7F { f32::NAN } else { value };
    f32::from_bits(value.to_bits() | u32::from(code & 0x80) << 24)
}

/// `fp4::decode` in operations that vectorise; `code` is 0..16.
#[inline(always)]
fn e2m1(code: u8) -> f32 {
    let magnitude = u32::from(code & 7);
    let normal = f32::from_bits((magnitude << 22) + (126 << 23));
    let value = if magnitude < 2 { magnitude as f32 * 0.5 } else { normal };
    f32::from_bits(value.to_bits() | u32::from(code & 8) << 28)
}

/// A weight matrix `[rows, cols]`: `rows` outputs, `cols` inputs.
#[derive(Clone)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    storage: Storage,
}

/// Rows and columns of a block-FP8 scale.
pub(crate) const BLOCK: usize = 128;
/// Columns that share an NVFP4 scale.
pub(crate) const GROUP: usize = 16;

impl Matrix {
    /// A matrix over `storage`, or `None` when a length does not fit `[rows, cols]`.
    pub fn new(rows: usize, cols: usize, storage: Storage) -> Option<Self> {
        let count = rows.checked_mul(cols)?;
        let len = |c: &Codes| (**c).as_ref().len();
        let fits = match &storage {
            Storage::F32(c) => Some(len(c)) == count.checked_mul(4),
            Storage::Bf16(c) => Some(len(c)) == count.checked_mul(2),
            Storage::Fp8Block { codes, scales } => {
                len(codes) == count && scales.len() == rows.div_ceil(BLOCK) * cols.div_ceil(BLOCK)
            }
            Storage::Fp8Row { codes, scales } => len(codes) == count && scales.len() == rows,
            Storage::Nvfp4 { codes, scales, .. } => {
                cols.is_multiple_of(GROUP) && len(codes) == count / 2 && len(scales) == count / GROUP
            }
        };
        fits.then_some(Self { rows, cols, storage })
    }

    /// A matrix of f32 values made here, such as gathered keys: `[values.len() / cols, cols]`.
    pub fn from_floats(cols: usize, values: Vec<f32>) -> Self {
        struct Floats(Vec<f32>);
        impl AsRef<[u8]> for Floats {
            fn as_ref(&self) -> &[u8] {
                // SAFETY: the bytes of the values, all initialised, for as long as they are borrowed.
                unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), size_of_val(self.0.as_slice())) }
            }
        }
        let rows = values.len() / cols;
        assert_eq!(values.len(), rows * cols, "whole rows");
        Self { rows, cols, storage: Storage::F32(Arc::new(Floats(values))) }
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Stored bytes, scales included.
    pub fn bytes(&self) -> usize {
        let len = |c: &Codes| (**c).as_ref().len();
        match &self.storage {
            Storage::F32(c) | Storage::Bf16(c) => len(c),
            Storage::Fp8Block { codes, scales } | Storage::Fp8Row { codes, scales } => {
                len(codes) + 4 * scales.len()
            }
            Storage::Nvfp4 { codes, scales, .. } => len(codes) + len(scales) + 4,
        }
    }

    /// The storage form.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// The factor that the law applies to every finished `dot32`: NVFP4's tensor scale, 1 otherwise. Rows may have their
    /// own instead: [`Self::row_scales`].
    pub fn output_scale(&self) -> f32 {
        match self.storage {
            Storage::Nvfp4 { tensor_scale, .. } => tensor_scale,
            _ => 1.0,
        }
    }

    /// The factor of each finished `dot32` by row, for [`Storage::Fp8Row`].
    pub fn row_scales(&self) -> Option<&[f32]> {
        match &self.storage {
            Storage::Fp8Row { scales, .. } => Some(scales),
            _ => None,
        }
    }

    /// The factor of row `n`, whatever it comes from.
    pub fn scale_of(&self, n: usize) -> f32 {
        self.row_scales().map_or_else(|| self.output_scale(), |scales| scales[n])
    }

    /// Decodes row `n` as the product sees it (without [`Self::scale_of`]), in storage order.
    #[inline(always)]
    pub fn decode_row(&self, n: usize, out: &mut [f32]) {
        let out = &mut out[..self.cols];
        match &self.storage {
            Storage::F32(c) => {
                let row = &(**c).as_ref()[n * self.cols * 4..(n + 1) * self.cols * 4];
                for (o, b) in out.iter_mut().zip(row.as_chunks::<4>().0) {
                    *o = f32::from_le_bytes(*b);
                }
            }
            Storage::Bf16(c) => {
                let row = &(**c).as_ref()[n * self.cols * 2..(n + 1) * self.cols * 2];
                for (o, b) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                    *o = bf16::from_bits(u16::from_le_bytes(*b));
                }
            }
            Storage::Fp8Block { codes, scales } => {
                let row = &(**codes).as_ref()[n * self.cols..(n + 1) * self.cols];
                let per_row = self.cols.div_ceil(BLOCK);
                let scales = &scales[n / BLOCK * per_row..(n / BLOCK + 1) * per_row];
                for ((o, c), &s) in out.chunks_mut(BLOCK).zip(row.chunks(BLOCK)).zip(scales) {
                    for (o, &c) in o.iter_mut().zip(c) {
                        *o = e4m3(c) * s;
                    }
                }
            }
            Storage::Fp8Row { codes, .. } => {
                let row = &(**codes).as_ref()[n * self.cols..(n + 1) * self.cols];
                for (o, &c) in out.iter_mut().zip(row) {
                    *o = e4m3(c);
                }
            }
            Storage::Nvfp4 { codes, scales, .. } => {
                let row = &(**codes).as_ref()[n * self.cols / 2..(n + 1) * self.cols / 2];
                let scales = &(**scales).as_ref()[n * self.cols / GROUP..(n + 1) * self.cols / GROUP];
                for ((o, c), &s) in out.chunks_exact_mut(GROUP).zip(row.chunks_exact(GROUP / 2)).zip(scales) {
                    let s = fp8::DECODE[s as usize];
                    let mut nibbles = [0u8; GROUP];
                    for (n, &c) in nibbles.as_chunks_mut::<2>().0.iter_mut().zip(c) {
                        *n = [c & 15, c >> 4];
                    }
                    for (o, n) in o.iter_mut().zip(nibbles) {
                        *o = e2m1(n) * s;
                    }
                }
            }
        }
    }

    /// Decodes row `n` of an NVFP4 matrix into halves and scale units (2^-9). False when it is not NVFP4.
    pub(crate) fn decode_row_exact(&self, n: usize, halves: &mut [i8], units: &mut [u32]) -> bool {
        let Storage::Nvfp4 { codes, scales, .. } = &self.storage else { return false };
        let row = &(**codes).as_ref()[n * self.cols / 2..(n + 1) * self.cols / 2];
        for (o, &c) in halves.chunks_exact_mut(2).zip(row) {
            o[0] = fp4::halves(c & 15);
            o[1] = fp4::halves(c >> 4);
        }
        let scales = &(**scales).as_ref()[n * self.cols / GROUP..(n + 1) * self.cols / GROUP];
        for (u, &s) in units.iter_mut().zip(scales) {
            // A checkpoint's scales are checked to be non-negative numbers when it is opened.
            *u = fp8::scale_units(s).unwrap_or(0);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectorised_decodes_are_the_codes_of_the_law() {
        for code in 0..=255u8 {
            let (got, want) = (e4m3(code), fp8::decode(code));
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "e4m3 {code:#x}");
        }
        for code in 0..16u8 {
            assert_eq!(e2m1(code).to_bits(), fp4::decode(code).to_bits(), "e2m1 {code:#x}");
        }
    }
}
