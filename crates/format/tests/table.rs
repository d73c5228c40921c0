//! The n-gram table store.

#![allow(
    clippy::unwrap_used,
    reason = "clippy's own exemption covers only #[test] functions, not their helpers"
)]

mod common;

use std::path::Path;

use castiron_format::{Checkpoint, ErrorKind, NgramTable, Source, TableMode};
use common::{TempDir, Tensor, golden, open, read, read_dir, tiny, variant};

fn file(cache_rows: usize, table: &NgramTable) -> TableMode {
    TableMode::File { cache_bytes: cache_rows * table.row_bytes() }
}

fn table(dir: &Path, layer: usize, mode: TableMode) -> NgramTable {
    open(dir).unwrap().ngram_table(layer, mode).unwrap()
}

fn gather(table: &NgramTable, rows: &[u64]) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows.len() * table.dim()];
    table.gather(rows, &mut out).unwrap();
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn golden_rows_concatenate_to_the_golden_embedding() {
    for (name, layer) in [("tiny_a", 1), ("tiny_b", 1), ("tiny_b", 4), ("tiny_bf16", 1)] {
        let tensors = read(&golden(name).join("golden.safetensors"));
        let rows: Vec<u64> =
            common::i64s(&tensors[&format!("layer.{layer}.ple.rows")]).iter().map(|&n| n as u64).collect();
        let want = &tensors[&format!("layer.{layer}.ple.emb")];
        let want: Vec<f32> = match want.dtype.as_str() {
            "F32" => want.data.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect(),
            _ => want
                .data
                .chunks_exact(2)
                .map(|c| f32::from_bits(u32::from(u16::from_le_bytes(c.try_into().unwrap())) << 16))
                .collect(),
        };
        let memory = table(&golden(name), layer, TableMode::Memory);
        assert_eq!(bits(&gather(&memory, &rows)), bits(&want), "{name} layer {layer}");
        let cached = table(&golden(name), layer, file(20, &memory));
        assert_eq!(bits(&gather(&cached, &rows)), bits(&want), "{name} layer {layer}");
    }
}

/// The scale is applied: a plain upcast of the codes would give 5000 times larger values, and fails here.
#[test]
fn fp8_rows_are_scaled() {
    for dir in [golden("tiny_fp8"), golden("tiny_nvfp4"), tiny()] {
        let tensors = read_dir(&dir);
        let stem = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding";
        let scale = &tensors[&format!("{stem}.weight_scale")];
        assert_eq!(scale.dtype, "BF16");
        let scale = f32::from_bits(u32::from(u16::from_le_bytes(scale.data[..2].try_into().unwrap())) << 16);
        let table = table(&dir, 1, TableMode::Memory);
        let mut first = 0;
        let mut largest = 0f32;
        for i in 0.. {
            let Some(shard) = tensors.get(&format!("{stem}.shard_{i}.weight")) else { break };
            let rows: Vec<u64> = (first..first + shard.shape[0] as u64).collect();
            let want: Vec<f32> =
                shard.data.iter().map(|&code| castiron_num::fp8::decode(code) * scale).collect();
            assert_eq!(bits(&gather(&table, &rows)), bits(&want));
            first += rows.len() as u64;
            largest = want.iter().fold(largest, |m, v| m.max(v.abs()));
        }
        assert_eq!(first, table.rows());
        assert!(largest > 0.0 && largest <= 448.0 * scale, "{largest}");
    }
}

#[test]
fn fp8_scale_forms() {
    let name = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.weight_scale";
    let scale = |dtype: &str, shape: &[usize], value: f32| {
        let data = if dtype == "F32" {
            value.to_le_bytes().to_vec()
        } else {
            value.to_bits().to_le_bytes()[2..].to_vec()
        };
        Tensor { dtype: dtype.into(), shape: shape.to_vec(), data }
    };
    let with = |t: Tensor| variant(&golden("tiny_fp8"), |tensors| drop(tensors.insert(name.into(), t)));
    let want = gather(&table(&with(scale("BF16", &[1], 0.5)).0, 1, TableMode::Memory), &[3, 9]);
    for t in [scale("BF16", &[], 0.5), scale("F32", &[1], 0.5), scale("F32", &[], 0.5)] {
        assert_eq!(gather(&table(&with(t).0, 1, TableMode::Memory), &[3, 9]), want);
    }
    let two = Tensor::f32(&[2], &[0.5, 0.5]);
    let error = open(&with(two).0).unwrap_err();
    assert!(error.kind() == ErrorKind::Census && error.to_string().contains(name), "{error}");
    for bad in [f32::NAN, f32::INFINITY, 0.0, -0.5] {
        let dir = with(scale("BF16", &[1], bad));
        let checkpoint = open(&dir.0).unwrap();
        let error = checkpoint.ngram_table(1, TableMode::Memory).unwrap_err();
        assert!(error.kind() == ErrorKind::BadValue && error.to_string().contains(name), "{error}");
        assert_eq!(checkpoint.weights().unwrap_err().kind(), ErrorKind::BadValue);
    }
    let dir = variant(&golden("tiny_fp8"), |tensors| drop(tensors.remove(name)));
    assert!(
        open(&dir.0).unwrap_err().to_string().contains(name),
        "an FP8 table without its scale is refused"
    );
    let bf16 = "model.layers.1.ple.ple_embedding.ngram_embedding.weight_scale";
    let dir =
        variant(&golden("tiny_bf16"), |tensors| drop(tensors.insert(bf16.into(), scale("BF16", &[1], 0.5))));
    assert!(open(&dir.0).unwrap_err().to_string().contains("unexpected"), "a BF16 table has no scale");
}

#[test]
fn file_equals_memory_whatever_the_cache() {
    let memory = table(&tiny(), 1, TableMode::Memory);
    // A fixed sequence with repeats, jumping over all shards.
    let mut x = 1u64;
    let rows: Vec<u64> = (0..3000)
        .map(|i| {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            if i % 3 == 0 { x >> 60 } else { (x >> 33) % memory.rows() }
        })
        .collect();
    let want = bits(&gather(&memory, &rows));
    for cache_rows in [0, 1, 2, 17, 100_000] {
        let cached = table(&tiny(), 1, file(cache_rows, &memory));
        for chunk in [1, 7, 16, 500, 3000] {
            let got: Vec<u32> = rows.chunks(chunk).flat_map(|rows| bits(&gather(&cached, rows))).collect();
            assert!(got == want, "cache of {cache_rows} rows, {chunk} at a time");
            rows.chunks(chunk).for_each(|rows| cached.prefetch(rows));
        }
        let stats = cached.stats();
        assert!(stats.bytes_read >= stats.prefetched * cached.row_bytes() as u64);
        assert!(cache_rows < 100_000 || stats.evictions == 0);
    }
    assert_eq!(memory.stats(), Default::default());
}

#[test]
fn cache_counts_and_evicts() {
    let memory = table(&tiny(), 1, TableMode::Memory);
    let cached = table(&tiny(), 1, file(4, &memory));
    let size = cached.row_bytes() as u64;
    gather(&cached, &[0, 1, 2, 3]);
    let stats = cached.stats();
    assert_eq!((stats.hits, stats.misses, stats.bytes_read, stats.evictions), (0, 4, 4 * size, 0));
    gather(&cached, &[0, 1, 0]);
    assert_eq!(cached.stats().hits, 3);
    // 0 and 1 were used, so 2 and 3 make room.
    gather(&cached, &[4, 5]);
    assert_eq!(cached.stats().evictions, 2);
    gather(&cached, &[0, 1, 4, 5]);
    assert_eq!((cached.stats().hits, cached.stats().misses), (7, 6));
    // A row that appears twice in one request is read once.
    gather(&cached, &[9, 9]);
    assert_eq!((cached.stats().misses, cached.stats().bytes_read), (8, 7 * size));
}

#[test]
fn prefetched_rows_are_found() {
    let memory = table(&tiny(), 1, TableMode::Memory);
    let cached = table(&tiny(), 1, file(1000, &memory));
    let rows: Vec<u64> = (0..400).map(|i| i * 37).collect();
    cached.prefetch(&rows);
    cached.prefetch(&[u64::MAX, memory.rows()]);
    assert_eq!(bits(&gather(&cached, &rows)), bits(&gather(&memory, &rows)));
    let stats = cached.stats();
    assert_eq!(
        (stats.hits, stats.misses, stats.prefetched),
        (400, 0, 400),
        "gather waits for rows on their way"
    );
}

#[test]
fn threads_share_a_table() {
    let memory = table(&tiny(), 1, TableMode::Memory);
    let cached = table(&tiny(), 1, file(50, &memory));
    std::thread::scope(|scope| {
        for seed in 0..4u64 {
            let (memory, cached) = (&memory, &cached);
            scope.spawn(move || {
                for i in 0..100 {
                    let rows: Vec<u64> =
                        (0..16).map(|q| (seed * 31 + i * 7 + q * 1009) % memory.rows()).collect();
                    cached.prefetch(&rows);
                    assert_eq!(gather(cached, &rows), gather(memory, &rows));
                }
            });
        }
    });
}

#[test]
fn refuses_rows_and_buffers() {
    for mode in [TableMode::Memory, TableMode::File { cache_bytes: 1000 }] {
        let table = table(&tiny(), 1, mode);
        let mut out = vec![0.0; table.dim()];
        let error = table.gather(&[table.rows()], &mut out).unwrap_err();
        assert!(
            error.kind() == ErrorKind::Row && error.to_string().contains(&table.rows().to_string()),
            "{error}"
        );
        assert_eq!(table.gather(&[u64::MAX], &mut out).unwrap_err().kind(), ErrorKind::Row);
        assert_eq!(table.gather(&[0, 1], &mut out).unwrap_err().kind(), ErrorKind::Row);
        table.gather(&[], &mut []).unwrap();
        table.gather(&[table.rows() - 1], &mut out).unwrap();
    }
    let checkpoint = open(tiny()).unwrap();
    for layer in [0, 2, 99] {
        assert_eq!(checkpoint.ngram_table(layer, TableMode::Memory).unwrap_err().kind(), ErrorKind::Config);
    }
}

#[test]
fn a_nan_names_its_row() {
    let dir = variant(&golden("tiny_fp8"), |tensors| {
        let shard = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_1.weight";
        let shard = tensors.get_mut(shard).unwrap();
        shard.data[5 * 8 + 3] = 0xFF;
    });
    for mode in [TableMode::Memory, TableMode::File { cache_bytes: 1000 }] {
        let table = table(&dir.0, 1, mode);
        let mut out = vec![0.0; table.dim()];
        table.gather(&[464 + 4], &mut out).unwrap();
        let error = table.gather(&[464 + 5], &mut out).unwrap_err();
        assert!(error.kind() == ErrorKind::BadValue && error.to_string().contains("row 469"), "{error}");
    }
}

#[test]
fn shards_may_be_unequal_and_single() {
    let stem = "model.layers.1.ple.ple_embedding.ngram_embedding";
    let whole = |tensors: &common::Tensors| {
        let mut all = tensors[&format!("{stem}.shard_0.weight")].clone();
        for i in 1..4 {
            let shard = &tensors[&format!("{stem}.shard_{i}.weight")];
            all.data.extend_from_slice(&shard.data);
            all.shape[0] += shard.shape[0];
        }
        all
    };
    let cut = |all: &Tensor, from: usize, to: usize| {
        let size = all.data.len() / all.shape[0];
        Tensor {
            dtype: all.dtype.clone(),
            shape: vec![to - from, all.shape[1]],
            data: all.data[from * size..to * size].to_vec(),
        }
    };
    let want = table(&golden("tiny_a"), 1, TableMode::Memory);
    let rows: Vec<u64> = (0..want.rows()).collect();
    let want = gather(&want, &rows);
    let layouts: [&[usize]; 3] =
        [&[0, 1, 1, 500, 928], &[0, 928], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 928]];
    for (i, layout) in layouts.iter().enumerate() {
        let dir = variant(&golden("tiny_a"), |tensors| {
            let all = whole(tensors);
            tensors.retain(|name, _| !name.starts_with(stem));
            for (n, ends) in layout.windows(2).enumerate() {
                let name = if i == 1 { format!("{stem}.weight") } else { format!("{stem}.shard_{n}.weight") };
                tensors.insert(name, cut(&all, ends[0], ends[1]));
            }
        });
        for mode in [TableMode::Memory, TableMode::File { cache_bytes: 1 << 16 }] {
            assert_eq!(bits(&gather(&table(&dir.0, 1, mode), &rows)), bits(&want));
        }
    }
    for (drop_shard, says) in [(2, "shard_2"), (0, "shard_0"), (3, "696 rows")] {
        let dir =
            variant(&golden("tiny_a"), |t| drop(t.remove(&format!("{stem}.shard_{drop_shard}.weight"))));
        let error = open(&dir.0).unwrap_err();
        assert!(error.kind() == ErrorKind::Census && error.to_string().contains(says), "{error}");
    }
}

#[test]
fn a_file_cut_while_in_use_is_an_error() {
    let dir = TempDir::new();
    for name in ["config.json", "model.safetensors"] {
        dir.write(name, std::fs::read(golden("tiny_a").join(name)).unwrap());
    }
    let table = table(&dir.0, 1, TableMode::File { cache_bytes: 0 });
    std::fs::OpenOptions::new()
        .write(true)
        .open(dir.0.join("model.safetensors"))
        .unwrap()
        .set_len(1000)
        .unwrap();
    let mut out = vec![0.0; table.dim()];
    let error = table.gather(&[table.rows() - 1], &mut out).unwrap_err();
    assert!(error.kind() == ErrorKind::Io && error.to_string().contains("model.safetensors"), "{error}");
}

#[test]
fn embedded_tables_need_no_file() {
    let leak = |name: &'static str| {
        (name, &*Box::leak(std::fs::read(golden("tiny_fp8").join(name)).unwrap().into_boxed_slice()))
    };
    let files = Box::leak(Box::new([leak("config.json"), leak("model.safetensors")]));
    let checkpoint = Checkpoint::open(Source::Memory(files)).unwrap();
    let on_disk = table(&golden("tiny_fp8"), 1, TableMode::Memory);
    let rows: Vec<u64> = (0..on_disk.rows()).collect();
    for mode in [TableMode::Memory, TableMode::File { cache_bytes: 4096 }] {
        assert_eq!(gather(&checkpoint.ngram_table(1, mode).unwrap(), &rows), gather(&on_disk, &rows));
    }
}
