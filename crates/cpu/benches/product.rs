//! Dense products against the ceilings of the same run: `cargo bench -p castiron-cpu --bench product`.

use std::sync::Arc;

use castiron_cpu::{Level, Matrix, Pool, Storage, peak, product};

/// Repetitions; the best counts.
const REPETITIONS: usize = 7;

fn bytes(count: usize, mut seed: u64) -> Vec<u8> {
    let mut next = move || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as u8
    };
    (0..count).map(|_| next()).collect()
}

/// bf16 values around 1 in size: any two bytes whose exponent is kept small.
fn bf16(count: usize, seed: u64) -> Vec<u8> {
    let mut data = bytes(count * 2, seed);
    data.chunks_exact_mut(2).for_each(|b| b[1] = b[1] & 0x80 | 0x3E | (b[1] & 1));
    data
}

fn storages(rows: usize, cols: usize) -> Vec<(&'static str, Storage)> {
    let codes = Arc::new(bytes(rows * cols, 3).into_iter().map(|b| b & 0xBF).collect::<Vec<u8>>());
    let scales = vec![0.01; rows.div_ceil(128) * cols.div_ceil(128)];
    let nibbles = Arc::new(bytes(rows * cols / 2, 5));
    let units = Arc::new(vec![0x38u8; rows * cols / 16]);
    vec![
        ("bf16", Storage::Bf16(Arc::new(bf16(rows * cols, 7)))),
        ("fp8-block", Storage::Fp8Block { codes, scales: scales.into() }),
        ("nvfp4 w4a16", Storage::Nvfp4 { codes: nibbles, scales: units, tensor_scale: 0.01 }),
    ]
}

fn main() {
    let level = Level::detect();
    println!("level {}; every figure is the best of {REPETITIONS}", level.name());
    let memory = bytes(1 << 29, 11);
    for threads in [1, 0] {
        let pool = Pool::new(threads);
        let fma = peak::fma_peak(level, &pool, REPETITIONS);
        let read = peak::read_bandwidth(level, &pool, &memory, REPETITIONS);
        println!(
            "\n{} threads: FMA peak {:.1} GFLOP/s, read {:.1} GB/s",
            pool.threads(),
            fma / 1e9,
            read / 1e9
        );
        one_row(level, &pool, read);
        for rows in [2, 4, 8, 64, 512] {
            many_rows(level, &pool, rows, fma);
        }
    }
}

/// Matrices that together are larger than the caches, read one after the other.
fn one_row(level: Level, pool: &Pool, read: f64) {
    let (n, k, count) = (2560, 2560, 24);
    for (name, storage) in storages(n * count, k) {
        let w = Matrix::new(n * count, k, storage).expect("shapes agree");
        let x: Vec<f32> = (0..k).map(|i| (i % 17) as f32 * 0.1 - 0.8).collect();
        let mut y = vec![0.0; n * count];
        let size = match w.storage() {
            Storage::Bf16(_) => 2.0,
            Storage::Nvfp4 { .. } => 0.5625,
            _ => 1.0,
        };
        let rate = peak::best(pool.threads(), REPETITIONS, || {
            product(level, pool, &w, &x, &mut y);
            (n * count * k) as f64 * size
        });
        println!("  1 row    {name:<12} {:6.1} GB/s  {:4.0} % of read", rate / 1e9, 100.0 * rate / read);
    }
}

fn many_rows(level: Level, pool: &Pool, rows: usize, fma: f64) {
    for (n, k) in [(2560, 2560), (10240, 320), (640, 2560)] {
        let storage = storages(n, k).swap_remove(0).1;
        let w = Matrix::new(n, k, storage).expect("shapes agree");
        let x: Vec<f32> = (0..rows * k).map(|i| (i % 19) as f32 * 0.1 - 0.9).collect();
        let mut y = vec![0.0; rows * n];
        let rate = peak::best(pool.threads(), REPETITIONS, || {
            product(level, pool, &w, &x, &mut y);
            2.0 * (rows * n * k) as f64
        });
        println!(
            "  {rows:<4} rows {n:>5} x {k:<5} {:6.1} GFLOP/s  {:4.0} % of FMA",
            rate / 1e9,
            100.0 * rate / fma
        );
    }
}
