//! How near the exact NVFP4 product comes to the processor's int8 peak, and quantising to the product.
//!
//! One thread. Peaks and products are measured in turn, several times, and the best of each is kept: a shared
//! machine only ever makes a figure worse. The denominator is the rate of `vpmaddubsw` alone, the instruction
//! the AVX2 form multiplies with (32 products each).

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use castiron_cpu::{Level, Matrix, Storage, W4a4Input, product_w4a4};

/// Outputs, inputs, over how many neighbouring codes the weights' scales spread (8 codes double a scale), and
/// rows of activations.
const SHAPES: [(usize, usize, u8, &[usize]); 7] = [
    (640, 2560, 24, &[1, 2, 4, 8, 16, 64, 256, 512]),
    (2560, 640, 24, &[1, 2, 4, 8, 16, 64, 256, 512]),
    (2560, 2560, 24, &[1, 8, 64]),
    (640, 640, 24, &[64]),
    // Too wide for the i32 path.
    (640, 2560, 104, &[8, 64, 256]),
    (2560, 640, 104, &[64]),
    // Little enough to finish between two interruptions.
    (64, 2560, 24, &[64]),
];
/// How long each figure is looked for, and how often peaks are measured meanwhile.
const BUDGET: Duration = Duration::from_millis(400);
const ROUNDS: u32 = 8;
/// Weights of one pass over different matrices, past the caches.
const COLD_BYTES: usize = 96 << 20;

fn noise(count: usize, seed: u64) -> Vec<u8> {
    let mut s = seed;
    (0..count)
        .map(|_| {
            s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (s >> 33) as u8
        })
        .collect()
}

fn seconds(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

/// Matrices of one shape, together larger than the caches for few rows.
fn matrices(n: usize, k: usize, spread: u8) -> Vec<Matrix> {
    let count = COLD_BYTES.div_ceil(n * k * 9 / 16);
    let codes = Arc::new(noise(count * n * k / 2, 1));
    let scales =
        Arc::new(noise(count * n * k / 16, 2).iter().map(|s| 0x68 - s % spread).collect::<Vec<u8>>());
    (0..count)
        .map(|i| {
            let storage = Storage::Nvfp4 {
                codes: Arc::new(Part(codes.clone(), i * n * k / 2, n * k / 2)),
                scales: Arc::new(Part(scales.clone(), i * n * k / 16, n * k / 16)),
                tensor_scale: 0.01,
            };
            Matrix::new(n, k, storage).expect("shapes agree")
        })
        .collect()
}

/// A piece of shared bytes, as a mapped checkpoint gives.
struct Part(Arc<Vec<u8>>, usize, usize);

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.0[self.1..self.1 + self.2]
    }
}

/// Best rates so far.
#[derive(Default)]
struct Peaks {
    /// Multiply-adds a second.
    multiply: f64,
    chain: f64,
    /// Bytes read a second.
    read: f64,
}

impl Peaks {
    fn measure(&mut self, memory: &[u8]) {
        let sum =
            |b: &[u8]| b.as_chunks::<8>().0.iter().fold(0u64, |a, b| a.wrapping_add(u64::from_le_bytes(*b)));
        for piece in memory.chunks(4 << 20).take(12) {
            let t = seconds(|| {
                black_box(sum(piece));
            });
            self.read = self.read.max(piece.len() as f64 / t);
        }
        #[cfg(target_arch = "x86_64")]
        if matches!(Level::detect().name(), "avx2" | "avx512") {
            const LOOPS: u64 = 20_000;
            for _ in 0..20 {
                // SAFETY: the level's name says that AVX2 is here.
                let t = seconds(|| unsafe { peak::multiply(LOOPS) });
                self.multiply = self.multiply.max((LOOPS * 12 * 32) as f64 / t);
                // SAFETY: as above.
                let t = seconds(|| unsafe { peak::chain(LOOPS) });
                self.chain = self.chain.max((LOOPS * 4 * 32) as f64 / t);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod peak {
    use std::arch::asm;

    /// Twelve independent `vpmaddubsw` a turn, registers only.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub unsafe fn multiply(loops: u64) {
        // SAFETY: no memory is touched, and every register used is named.
        unsafe {
            asm!(
                "2:",
                "vpmaddubsw {a}, {a}, {c}", "vpmaddubsw {b}, {b}, {c}", "vpmaddubsw {d}, {d}, {c}",
                "vpmaddubsw {e}, {e}, {c}", "vpmaddubsw {f}, {f}, {c}", "vpmaddubsw {g}, {g}, {c}",
                "vpmaddubsw {h}, {h}, {c}", "vpmaddubsw {i}, {i}, {c}", "vpmaddubsw {j}, {j}, {c}",
                "vpmaddubsw {k}, {k}, {c}", "vpmaddubsw {l}, {l}, {c}", "vpmaddubsw {m}, {m}, {c}",
                "dec {n}", "jnz 2b",
                n = inout(reg) loops => _, c = out(ymm_reg) _,
                a = out(ymm_reg) _, b = out(ymm_reg) _, d = out(ymm_reg) _, e = out(ymm_reg) _,
                f = out(ymm_reg) _, g = out(ymm_reg) _, h = out(ymm_reg) _, i = out(ymm_reg) _,
                j = out(ymm_reg) _, k = out(ymm_reg) _, l = out(ymm_reg) _, m = out(ymm_reg) _,
                options(nomem, nostack),
            );
        }
    }

    /// Four times `vpmaddubsw`, `vpmaddwd`, `vpaddd` a turn: the usual int8 dot, registers only.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub unsafe fn chain(loops: u64) {
        // SAFETY: no memory is touched, and every register used is named.
        unsafe {
            asm!(
                "2:",
                "vpmaddubsw {a}, {c}, {c}", "vpmaddubsw {b}, {c}, {c}", "vpmaddubsw {d}, {c}, {c}", "vpmaddubsw {e}, {c}, {c}",
                "vpmaddwd {a}, {a}, {c}", "vpmaddwd {b}, {b}, {c}", "vpmaddwd {d}, {d}, {c}", "vpmaddwd {e}, {e}, {c}",
                "vpaddd {f}, {f}, {a}", "vpaddd {g}, {g}, {b}", "vpaddd {h}, {h}, {d}", "vpaddd {i}, {i}, {e}",
                "dec {n}", "jnz 2b",
                n = inout(reg) loops => _, c = out(ymm_reg) _,
                a = out(ymm_reg) _, b = out(ymm_reg) _, d = out(ymm_reg) _, e = out(ymm_reg) _,
                f = out(ymm_reg) _, g = out(ymm_reg) _, h = out(ymm_reg) _, i = out(ymm_reg) _,
                options(nomem, nostack),
            );
        }
    }
}

fn main() {
    // The widest, or the one named on the command line.
    let named = |l: &Level| std::env::args().any(|a| a == l.name());
    let level = Level::present().into_iter().find(named).unwrap_or(Level::detect());
    println!("form {}, one thread, best within {BUDGET:?} each", level.name());
    let memory = noise(COLD_BYTES, 3);
    let mut peaks = Peaks::default();
    for (n, k, spread, counts) in SHAPES {
        let matrices = matrices(n, k, spread);
        for &rows in counts {
            let x: Vec<f32> = noise(rows * k, 4).iter().map(|&b| f32::from(b as i8) / 50.0).collect();
            let (input, _) = W4a4Input::quantise(&x, k, 0.002);
            let mut y = vec![0.0; rows * n];
            // A few rows meet cold weights: another matrix each time.
            let mut next = matrices.iter().cycle();
            let (mut product, mut quantise) = (f64::INFINITY, f64::INFINITY);
            for _ in 0..ROUNDS {
                peaks.measure(&memory);
                let start = Instant::now();
                while start.elapsed() < BUDGET / ROUNDS {
                    let w = next.next().expect("endless");
                    product = product.min(seconds(|| assert!(product_w4a4(level, w, &input, &mut y))));
                }
                quantise = quantise.min(seconds(|| drop(black_box(W4a4Input::quantise(&x, k, 0.002)))));
            }
            report((n, k, spread), rows, product, quantise, &peaks);
        }
    }
    println!(
        "peaks: vpmaddubsw {:.1} GMAC/s (the denominator), vpmaddubsw+vpmaddwd+vpaddd {:.1} GMAC/s, read {:.1} GB/s",
        peaks.multiply / 1e9,
        peaks.chain / 1e9,
        peaks.read / 1e9
    );
}

fn report((n, k, spread): (usize, usize, u8), rows: usize, product: f64, quantise: f64, peaks: &Peaks) {
    let (macs, bytes) = ((rows * n * k) as f64 / product, (n * k * 9 / 16) as f64 / product);
    println!(
        "N {n:4} K {k:4} scales {spread:3} rows {rows:3}: {:6.1} GMAC/s = {:4.1} % of vpmaddubsw, {:5.1} % of the chain; weights {:5.2} GB/s = \
         {:4.1} % of read; quantise {:.2} ns an element",
        macs / 1e9,
        100.0 * macs / peaks.multiply,
        100.0 * macs / peaks.chain,
        bytes / 1e9,
        100.0 * bytes / peaks.read,
        quantise / (rows * k) as f64 * 1e9,
    );
}
