//! The n-gram hash: published vectors, stored buffers and golden row ids.

#![allow(
    clippy::unwrap_used,
    reason = "clippy's own exemption covers only #[test] functions, not their helpers"
)]

mod common;

use castiron_format::Config;
use castiron_format::ErrorKind;
use castiron_format::ngram::Hash;
use common::{config_value, golden, i64s, open, read, read_dir, tiny, variant, with_config};
use serde_json::json;

/// The released configuration as far as the hash goes.
fn released() -> Hash {
    let mut config = config_value(&tiny());
    let text = &mut config["text_config"];
    for (key, value) in [
        ("vocab_size", 248_320),
        ("ple_embed_dim", 2560),
        ("ngram_vocab_size_base", 20_000_000),
        ("split_ngram_parts", 128),
        ("eos_token_id", 248_044),
    ] {
        text[key] = json!(value);
    }
    Hash::derive(&Config::parse("config.json", config.to_string().as_bytes()).unwrap(), 0).unwrap()
}

#[test]
fn constants_of_the_released_model() {
    let hash = released();
    assert_eq!(hash.multipliers(), [23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071]);
    let tails = [3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171];
    assert_eq!(hash.moduli(), tails.map(|t| 20_000_000 + t));
    assert_eq!(hash.offsets()[..4], [0, 20_000_003, 40_000_026, 60_000_059]);
    assert_eq!(hash.offsets()[15], 300_001_275);
    assert_eq!((hash.total_rows(), hash.heads(), hash.history(), hash.eos()), (320_001_536, 16, 2, 248_044));
}

#[test]
fn rows_of_the_released_model() {
    let hash = released();
    let want: [[u64; 16]; 3] = [
        [
            13981229, 30076798, 49239434, 61315716, 98540601, 111186732, 120378863, 146384625, 173637879,
            184336749, 217808755, 222173721, 249579227, 277180543, 299757935, 312970430,
        ],
        [
            4908448, 36872991, 46611251, 64451521, 83649409, 110850044, 122402102, 159207155, 170314019,
            195445770, 214314282, 239389039, 254862662, 271565595, 284073139, 308659387,
        ],
        [
            4582007, 37691206, 44255274, 65455601, 89351473, 103985474, 135938409, 145212418, 163775156,
            199680439, 200044921, 228961047, 240669798, 272736434, 296838250, 317942745,
        ],
    ];
    assert_eq!(hash.rows_of(&[], &[248_045, 846, 198]), want.concat());
    assert_eq!(hash.rows_of(&[248_044, 248_044], &[248_045, 846, 198]), want.concat());
    let zero = [
        768795, 32189829, 51641306, 71063218, 85886852, 104959504, 134316676, 154856127, 173280301,
        194832882, 202840854, 222492280, 256138797, 271010889, 296240796, 304432235,
    ];
    assert_eq!(hash.rows_of(&[], &[0]), zero);
    // An eos just before hides what is older.
    let after_eos = [
        4064167, 21428206, 43851727, 63435096, 89826284, 106088217, 121229381, 156147803, 175176707,
        188463481, 216828809, 228933352, 248448227, 269188956, 283041664, 314347972,
    ];
    let mut out = [0; 16];
    for prev in [&[100, 248_044][..], &[248_044], &[], &[1, 2, 3, 5, 248_044]] {
        hash.rows(prev, 42, &mut out);
        assert_eq!(out, after_eos);
    }
    // The current token being eos does not end its own window; ids out of range stay inside the table.
    hash.rows(&[5, 6], 248_044, &mut out);
    assert_ne!(out.to_vec(), hash.rows_of(&[], &[248_044]));
    hash.rows(&[u32::MAX, u32::MAX], u32::MAX, &mut out);
    assert!(out.iter().all(|&row| row < hash.total_rows()));
}

#[test]
fn golden_rows() {
    for (name, layers) in [("tiny_a", &[1][..]), ("tiny_bf16", &[1]), ("tiny_b", &[1, 4])] {
        let checkpoint = open(golden(name)).unwrap();
        let tensors = read(&golden(name).join("golden.safetensors"));
        let ids: Vec<u32> = i64s(&tensors["input_ids"]).iter().map(|&n| n as u32).collect();
        for (number, layer) in layers.iter().enumerate() {
            let hash = Hash::derive(checkpoint.config(), number).unwrap();
            let want: Vec<u64> =
                i64s(&tensors[&format!("layer.{layer}.ple.rows")]).iter().map(|&n| n as u64).collect();
            assert_eq!(hash.rows_of(&[], &ids), want, "{name} layer {layer}");
            // Decoding token by token, with only the history that a window needs.
            for (t, want) in want.chunks_exact(hash.heads()).enumerate() {
                let mut out = vec![0; hash.heads()];
                hash.rows(&ids[t.saturating_sub(hash.history())..t], ids[t], &mut out);
                assert_eq!(out, want);
            }
            let state = i64s(&tensors[&format!("state.{layer}.ple.ids")]);
            assert_eq!(state.len(), hash.history());
        }
    }
}

/// The position in the sorted list of different layers seeds the hash, as in the reference.
#[test]
fn order_and_repeats_of_ple_layer_ids_do_not_change_the_rows() {
    let base = golden("tiny_b");
    let tensors = read(&base.join("golden.safetensors"));
    let ids: Vec<u32> = i64s(&tensors["input_ids"]).iter().map(|&n| n as u32).collect();
    for list in [json!([5, 2]), json!([2, 5, 5])] {
        let dir = with_config(&base, |config| {
            let object = if config["text_config"].is_object() { &mut config["text_config"] } else { config };
            object["ple_layer_ids"] = list.clone();
        });
        let checkpoint = open(&dir.0).unwrap();
        checkpoint.weights().unwrap();
        for (number, layer) in [1, 4].into_iter().enumerate() {
            checkpoint.ngram_table(layer, castiron_format::TableMode::Memory).unwrap();
            let hash = Hash::derive(checkpoint.config(), number).unwrap();
            let want = i64s(&tensors[&format!("layer.{layer}.ple.rows")]);
            let rows = hash.rows_of(&[], &ids);
            assert!(rows.iter().map(|&row| row as i64).eq(want), "{list} layer {layer}");
        }
    }
}

#[test]
fn stored_buffers_are_checked() {
    for buffer in ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"] {
        let dir = variant(&golden("tiny_b"), |tensors| {
            let name = format!("model.layers.4.ple.ple_embedding.{buffer}");
            tensors.get_mut(&name).unwrap().data[8] ^= 2;
        });
        let checkpoint = open(&dir.0).unwrap();
        for error in [
            checkpoint.weights().unwrap_err(),
            checkpoint.ngram_table(4, castiron_format::TableMode::Memory).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::BadValue);
            assert!(error.to_string().contains(buffer) && error.to_string().contains("layers.4"), "{error}");
        }
        checkpoint.ngram_table(1, castiron_format::TableMode::Memory).unwrap();
    }
    // Without the buffers the derived constants stand, and a note says so.
    let dir = variant(&golden("tiny_b"), |tensors| tensors.retain(|name, _| !name.contains("ngram_heads")));
    let checkpoint = open(&dir.0).unwrap();
    checkpoint.weights().unwrap();
    assert!(checkpoint.notes().iter().any(|n| n.contains("ngram_heads_offsets")));
    assert!(read_dir(&dir.0).len() > 100);
}
