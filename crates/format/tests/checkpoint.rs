//! Whole checkpoints: every layout, the census, the index, the side files.

#![allow(
    clippy::unwrap_used,
    reason = "clippy's own exemption covers only #[test] functions, not their helpers"
)]

mod common;

use std::fs;
use std::path::Path;

use castiron_format::{
    Checkpoint, Config, ErrorKind, Expert, LayerKind, Matrix, MatrixData, Mixer, Source, TableMode, Weights,
};
use common::{GOLDENS, TempDir, Tensor, Tensors, encode, golden, open, read_dir, tiny, variant, with_config};
use serde_json::json;

fn bytes(matrix: &Matrix) -> &[u8] {
    match &matrix.data {
        MatrixData::F32(b) | MatrixData::Bf16(b) => b,
        MatrixData::Fp8Block { codes, .. }
        | MatrixData::Fp8Row { codes, .. }
        | MatrixData::Nvfp4 { codes, .. } => codes,
    }
}

fn check_matrix(m: &Matrix, rows: usize, cols: usize) {
    assert_eq!((m.rows, m.cols), (rows, cols));
    let bits = match &m.data {
        MatrixData::F32(_) => 32,
        MatrixData::Bf16(_) => 16,
        MatrixData::Fp8Block { scales, scale_rows, scale_cols, .. } => {
            assert_eq!((*scale_rows, *scale_cols), (rows.div_ceil(128), cols.div_ceil(128)));
            assert_eq!(scales.len(), scale_rows * scale_cols);
            8
        }
        MatrixData::Fp8Row { scales, .. } => {
            assert_eq!(scales.len(), rows);
            8
        }
        MatrixData::Nvfp4 { scales, weight_scale_2, .. } => {
            assert_eq!(scales.len(), rows * cols / 16);
            assert!(*weight_scale_2 > 0.0);
            4
        }
    };
    assert_eq!(bytes(m).len() * 8, rows * cols * bits);
}

fn check_expert(e: &Expert, inner: usize, d: usize) {
    check_matrix(&e.gate, inner, d);
    check_matrix(&e.up, inner, d);
    check_matrix(&e.down, d, inner);
}

/// Every shape against the configuration.
fn check(weights: &Weights, c: &Config) {
    let (d, wide) = (c.hidden_size, c.wide());
    check_matrix(&weights.embed, c.vocab_size, d);
    check_matrix(&weights.lm_head, c.vocab_size, d);
    assert!(weights.final_hc.inject.is_none());
    let layers = weights
        .layers
        .iter()
        .zip(&c.layer_kinds)
        .chain(weights.mtp.iter().map(|m| (&*m.layer, &LayerKind::Attention)));
    for (layer, kind) in layers {
        for hc in [&layer.attn_hc, &layer.mlp_hc] {
            assert_eq!(hc.norm.len(), wide);
            check_matrix(&hc.down, c.hc_lowrank, wide);
            check_matrix(&hc.up, wide, c.hc_lowrank);
            check_matrix(hc.inject.as_ref().unwrap(), c.hc_count, wide);
        }
        match &layer.mixer {
            Mixer::Gdn(gdn) => {
                assert_eq!(*kind, LayerKind::Linear);
                check_matrix(&gdn.in_qkv, c.gdn_channels(), d);
                check_matrix(&gdn.out, d, c.gdn.value_heads * c.gdn.value_head_dim);
                assert_eq!(gdn.conv.len(), c.gdn_channels() * c.gdn.conv_kernel);
                assert_eq!((gdn.a_log.len(), gdn.dt_bias.len()), (c.gdn.value_heads, c.gdn.value_heads));
                assert_eq!(gdn.norm.len(), c.gdn.value_head_dim);
            }
            Mixer::Attention(attention) => {
                assert_eq!(*kind, LayerKind::Attention);
                check_matrix(&attention.q, 2 * c.heads * c.head_dim, d);
                check_matrix(&attention.index_qk, (c.indexer.heads + 1) * c.indexer.head_dim, d);
                assert_eq!(
                    (attention.k_norm.len(), attention.index_k_norm.len()),
                    (c.head_dim, c.indexer.head_dim)
                );
            }
        }
        assert_eq!(layer.moe.experts.len(), c.moe.experts);
        layer.moe.experts.iter().for_each(|e| check_expert(e, c.moe.intermediate, d));
        check_expert(&layer.moe.shared, c.moe.shared_intermediate, d);
    }
    let ple: Vec<usize> = (0..c.num_layers).filter(|&i| weights.layers[i].ple.is_some()).collect();
    assert_eq!(ple, c.ple.as_ref().unwrap().layers);
    for ple in weights.layers.iter().filter_map(|l| l.ple.as_ref()) {
        check_matrix(&ple.key, wide, c.ple.as_ref().unwrap().embed_dim);
        assert_eq!((ple.norm_conv.len(), ple.conv.len()), (wide, wide * c.ple.as_ref().unwrap().conv_kernel));
    }
}

#[test]
fn opens_every_golden_and_the_embedded_checkpoint() {
    for dir in GOLDENS.iter().map(|n| golden(n)).chain([tiny()]) {
        let checkpoint = open(&dir).unwrap();
        let weights = checkpoint.weights().unwrap();
        check(&weights, checkpoint.config());
        assert!(weights.mtp.is_some(), "{}", dir.display());
        let inventory = checkpoint.inventory();
        let tensors = read_dir(&dir);
        assert_eq!(inventory.tensors, tensors.len());
        assert_eq!(inventory.bytes, tensors.values().map(|t| t.data.len() as u64).sum::<u64>());
        assert_eq!(inventory.components.iter().map(|c| c.tensors).sum::<usize>(), inventory.tensors);
        assert!(inventory.components.iter().all(|c| c.name != "other"), "{inventory:#?}");
        assert!(
            inventory.components.iter().all(|c| c.formats.iter().map(|f| f.bytes).sum::<u64>() == c.bytes)
        );
        let nvfp4 = dir.ends_with("tiny_nvfp4") || dir == tiny();
        assert_eq!(checkpoint.declared_w4a4(), nvfp4);
        assert!(checkpoint.notes().is_empty(), "{:?}", checkpoint.notes());
    }
}

#[test]
fn reads_side_files() {
    let checkpoint = open(tiny()).unwrap();
    assert_eq!(checkpoint.generation().eos, [2036, 2034]);
    assert_eq!(
        &*checkpoint.file("tokenizer.json").unwrap().unwrap(),
        fs::read(tiny().join("tokenizer.json")).unwrap()
    );
    for name in ["nothing.json", "../tiny/config.json", "", ".", "..", "/etc/hostname"] {
        assert!(checkpoint.file(name).unwrap().is_none(), "{name}");
    }
}

#[test]
fn digest_tells_checkpoints_apart() {
    let digest = |dir: &Path| open(dir).unwrap().digest();
    let base = golden("tiny_fp8");
    assert_eq!(digest(&base), digest(&base));
    assert_eq!(digest(&base).len(), 64);
    let same = variant(&base, |_| {});
    let config = with_config(&base, |c| c["text_config"]["num_experts_per_tok"] = json!(1));
    let tensors = variant(&base, |t| {
        drop(t.remove("model.language_model.layers.1.ple.ple_embedding.layer_multipliers"))
    });
    let all = [digest(&base), digest(&same.0), digest(&config.0), digest(&tensors.0)];
    for (i, a) in all.iter().enumerate() {
        assert!(all[..i].iter().all(|b| a != b), "the rewritten header, config and tensors each count");
    }
}

#[test]
fn embedded_equals_directory() {
    let leak = |entry: fs::DirEntry| -> (&'static str, &'static [u8]) {
        let name = entry.file_name().into_string().unwrap();
        (name.leak(), fs::read(entry.path()).unwrap().leak())
    };
    let files: Vec<_> = fs::read_dir(tiny()).unwrap().map(|e| leak(e.unwrap())).collect();
    let embedded = Checkpoint::open(Source::Memory(files.leak())).unwrap();
    let directory = open(tiny()).unwrap();
    assert_eq!(embedded.digest(), directory.digest());
    assert_eq!((embedded.config(), embedded.inventory()), (directory.config(), directory.inventory()));
    let (a, b) = (embedded.weights().unwrap(), directory.weights().unwrap());
    assert_eq!(bytes(&a.layers[7].moe.experts[31].up), bytes(&b.layers[7].moe.experts[31].up));
    assert!(embedded.file("tokenizer.json").unwrap().is_some() && embedded.file("x").unwrap().is_none());
}

/// Makes a named pipe, which an ordinary open for reading would wait on for ever.
#[cfg(unix)]
fn make_pipe(path: &Path) {
    assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_refused_by_name_and_never_waited_for() {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    let index = "model.safetensors.index.json";
    let refused = |dir: &Path, name: &str, what: &str| {
        for error in [open(dir).err(), open(dir).ok().and_then(|c| c.file(name).err())] {
            let Some(error) = error else { continue };
            assert_eq!(error.kind(), ErrorKind::NotAFile, "{error}");
            assert!(error.to_string().contains(name) && error.to_string().contains(what), "{error}");
            return;
        }
        panic!("{name} was accepted");
    };
    let names = ["config.json", "generation_config.json", "model.safetensors", index, "tokenizer.json"];
    for name in names {
        for what in ["a named pipe", "a directory", "a socket", "a device"] {
            let dir = variant(&golden("tiny_a"), |_| {});
            let path = dir.0.join(name);
            let _ = fs::remove_file(&path);
            let _listener = match what {
                "a named pipe" => {
                    // Through a link, as a real one would come.
                    make_pipe(&dir.0.join("pipe"));
                    symlink(dir.0.join("pipe"), &path).unwrap();
                    None
                }
                "a directory" => {
                    fs::create_dir(&path).unwrap();
                    None
                }
                "a device" => {
                    symlink("/dev/zero", &path).unwrap();
                    None
                }
                _ => Some(UnixListener::bind(&path).unwrap()),
            };
            refused(&dir.0, name, what);
        }
    }
    // A link to a regular file is a regular file: caches keep checkpoints so.
    let dir = variant(&golden("tiny_a"), |_| {});
    fs::rename(dir.0.join("config.json"), dir.0.join("blob")).unwrap();
    symlink("blob", dir.0.join("config.json")).unwrap();
    open(&dir.0).unwrap();
}

#[test]
fn a_side_file_that_cannot_be_read_is_an_error_and_not_absent() {
    let dir = variant(&golden("tiny_a"), |_| {});
    let long = fs::File::create(dir.0.join("tokenizer.json")).unwrap();
    long.set_len((1 << 28) + 1).unwrap();
    let checkpoint = open(&dir.0).unwrap();
    let error = checkpoint.file("tokenizer.json").unwrap_err();
    assert!(
        error.to_string().contains("tokenizer.json") && error.to_string().contains("268435456"),
        "{error}"
    );
    #[cfg(unix)]
    {
        use std::os::unix::fs::{PermissionsExt, symlink};
        symlink("nowhere", dir.0.join("chat_template.jinja")).unwrap();
        let path = dir.0.join("secret.json");
        fs::write(&path, "{}").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
        let checkpoint = open(&dir.0).unwrap();
        let error = checkpoint.file("chat_template.jinja").unwrap_err();
        assert!(
            error.kind() == ErrorKind::MissingFile && error.to_string().contains("chat_template"),
            "{error}"
        );
        // Root reads everything.
        if fs::read(&path).is_err() {
            let error = checkpoint.file("secret.json").unwrap_err();
            assert!(error.kind() == ErrorKind::Io && error.to_string().contains("secret.json"), "{error}");
        }
    }
}

/// Names of all prefixes give the same weights.
#[test]
fn accepts_every_prefix() {
    let want = open(golden("tiny_bf16")).unwrap().weights().unwrap();
    for prefix in ["model.language_model.", "language_model.model."] {
        let dir = variant(&golden("tiny_bf16"), |tensors| {
            let old = std::mem::take(tensors);
            let outer = prefix.starts_with("language");
            tensors.extend(old.into_iter().map(|(name, t)| match name.strip_prefix("model.") {
                Some(rest) => (format!("{prefix}{rest}"), t),
                None if outer => (format!("language_model.{name}"), t),
                None => (name, t),
            }));
        });
        let got = open(&dir.0).unwrap();
        got.ngram_table(1, TableMode::Memory).unwrap();
        let got = got.weights().unwrap();
        assert_eq!(bytes(&got.lm_head), bytes(&want.lm_head));
        assert!(got.mtp.is_some());
    }
}

fn fuse(tensors: &mut Tensors, stem: &str, experts: usize) {
    let mut join = |projections: &[&str], name: &str| {
        let mut fused: Option<Tensor> = None;
        for e in 0..experts {
            for p in projections {
                let t = tensors.remove(&format!("{stem}.{e}.{p}.weight")).unwrap();
                let all = fused.get_or_insert_with(|| Tensor { data: Vec::new(), ..t.clone() });
                all.data.extend_from_slice(&t.data);
            }
        }
        let mut all = fused.unwrap();
        all.shape = vec![experts, projections.len() * all.shape[0], all.shape[1]];
        tensors.insert(format!("{stem}.{name}"), all);
    };
    join(&["gate_proj", "up_proj"], "gate_up_proj");
    join(&["down_proj"], "down_proj");
}

#[test]
fn fused_equals_per_expert_in_any_mix() {
    let want = open(golden("tiny_a")).unwrap().weights().unwrap();
    let dir = variant(&golden("tiny_a"), |tensors| {
        fuse(tensors, "model.layers.0.mlp.experts", 16);
        // Only half of layer 1: gate and up fused, down per expert.
        let downs: Vec<_> = tensors
            .iter()
            .filter(|(n, _)| n.contains("layers.1.mlp.experts") && n.contains("down"))
            .collect();
        let downs: Vec<_> = downs.into_iter().map(|(n, t)| (n.clone(), t.clone())).collect();
        fuse(tensors, "model.layers.1.mlp.experts", 16);
        tensors.remove("model.layers.1.mlp.experts.down_proj");
        tensors.extend(downs);
    });
    let got = open(&dir.0).unwrap().weights().unwrap();
    for (a, b) in got.layers.iter().zip(&want.layers) {
        for (a, b) in a.moe.experts.iter().zip(&b.moe.experts) {
            assert!(
                bytes(&a.gate) == bytes(&b.gate)
                    && bytes(&a.up) == bytes(&b.up)
                    && bytes(&a.down) == bytes(&b.down)
            );
        }
    }
    let dir = variant(&golden("tiny_a"), |tensors| {
        fuse(tensors, "model.layers.0.mlp.experts", 16);
        tensors.get_mut("model.layers.0.mlp.experts.gate_up_proj").unwrap().shape = vec![16, 64, 48];
    });
    let error = open(&dir.0).unwrap_err();
    assert!(error.to_string().contains("[16, 64, 48], not [16, 48, 64]"), "{error}");
}

#[test]
fn formats_of_the_golden_experts() {
    let weights = open(golden("tiny_fp8")).unwrap().weights().unwrap();
    assert_eq!(weights.layers[0].moe.experts[0].gate.format(), "fp8-block");
    assert_eq!(weights.mtp.unwrap().layer.moe.experts[3].down.format(), "fp8-block");
    let tensors = read_dir(&golden("tiny_nvfp4"));
    let weights = open(golden("tiny_nvfp4")).unwrap().weights().unwrap();
    let stem = "model.language_model.layers.2.mlp.experts.1.down_proj";
    let MatrixData::Nvfp4 { codes, scales, weight_scale_2, input_scale } =
        &weights.layers[2].moe.experts[1].down.data
    else {
        panic!("not NVFP4");
    };
    assert!(
        **codes == tensors[&format!("{stem}.weight")].data
            && **scales == tensors[&format!("{stem}.weight_scale")].data
    );
    assert_eq!(*weight_scale_2, tensors[&format!("{stem}.weight_scale_2")].scalar());
    assert_eq!(*input_scale, Some(tensors[&format!("{stem}.input_scale")].scalar()));
    // Draft experts are block FP8 with F32 scales.
    assert_eq!(weights.mtp.unwrap().layer.moe.experts[0].up.format(), "fp8-block");
}

/// Global scales become powers of two, whose reciprocals are exact.
fn round_scales(tensors: &mut Tensors) {
    for (name, t) in tensors.iter_mut() {
        if name.ends_with(".weight_scale_2") || name.ends_with(".input_scale") {
            t.data = t.scalar().log2().round().exp2().to_le_bytes().to_vec();
        }
    }
}

fn to_compressed_tensors(tensors: &mut Tensors) {
    for (name, t) in std::mem::take(tensors) {
        let reciprocal = |t: &Tensor| Tensor::f32(&[1], &[1.0 / t.scalar()]);
        let (name, t) = if let Some(stem) = name.strip_suffix(".weight_scale_2") {
            (format!("{stem}.weight_global_scale"), reciprocal(&t))
        } else if let Some(stem) = name.strip_suffix(".input_scale") {
            (format!("{stem}.input_global_scale"), reciprocal(&t))
        } else if t.dtype == "U8" {
            (name.replace(".weight", ".weight_packed"), t)
        } else {
            (name, t)
        };
        tensors.insert(name, t);
    }
}

#[test]
fn compressed_tensors_equals_modelopt() {
    let base = golden("tiny_nvfp4");
    let modelopt = variant(&base, round_scales);
    let compressed = variant(&base, |t| {
        round_scales(t);
        to_compressed_tensors(t);
    });
    let (a, b) = (open(&modelopt.0).unwrap(), open(&compressed.0).unwrap());
    assert!(a.declared_w4a4() && b.declared_w4a4());
    let (a, b) = (a.weights().unwrap(), b.weights().unwrap());
    for (a, b) in a.layers.iter().zip(&b.layers) {
        for (a, b) in a.moe.experts.iter().zip(&b.moe.experts) {
            for (a, b) in [(&a.gate, &b.gate), (&a.up, &b.up), (&a.down, &b.down)] {
                let MatrixData::Nvfp4 { scales: s, weight_scale_2: w, input_scale: i, .. } = &a.data else {
                    panic!()
                };
                let MatrixData::Nvfp4 { scales: t, weight_scale_2: x, input_scale: j, .. } = &b.data else {
                    panic!()
                };
                assert!(bytes(a) == bytes(b) && **s == **t && w == x && i == j && i.is_some());
            }
        }
    }
}

#[test]
fn w4a4_needs_every_activation_scale() {
    let base = golden("tiny_nvfp4");
    let none = variant(&base, |t| t.retain(|name, _| !name.ends_with(".input_scale")));
    let checkpoint = open(&none.0).unwrap();
    assert!(!checkpoint.declared_w4a4());
    let weights = checkpoint.weights().unwrap();
    assert!(matches!(
        weights.layers[0].moe.experts[0].gate.data,
        MatrixData::Nvfp4 { input_scale: None, .. }
    ));
    let one = "model.language_model.layers.2.mlp.experts.3.up_proj.input_scale";
    let most = variant(&base, |t| drop(t.remove(one)));
    assert!(!open(&most.0).unwrap().declared_w4a4());
}

/// Replaces the routed experts of a main layer by BF16 ones.
fn plain_experts(tensors: &mut Tensors, layer: usize) {
    let stem = format!("model.language_model.layers.{layer}.mlp.experts.");
    let names: Vec<String> =
        tensors.keys().filter(|n| n.starts_with(&stem) && n.ends_with("_proj.weight")).cloned().collect();
    for name in names {
        let codes = tensors.remove(&name).unwrap();
        let shape = vec![codes.shape[0], 2 * codes.shape[1]];
        let data = vec![0; 2 * shape[0] * shape[1]];
        for suffix in ["_scale", "_scale_2"] {
            tensors.remove(&format!("{name}{suffix}"));
        }
        tensors.remove(&name.replace(".weight", ".input_scale"));
        tensors.insert(name, Tensor { dtype: "BF16".into(), shape, data });
    }
}

#[test]
fn w4a4_does_not_ask_for_scales_of_experts_in_other_formats() {
    let base = golden("tiny_nvfp4");
    let layers = open(&base).unwrap().config().num_layers;
    let mixed = open(&variant(&base, |t| plain_experts(t, 1)).0).unwrap();
    assert!(mixed.declared_w4a4());
    assert_eq!(mixed.weights().unwrap().layers[1].moe.experts[0].gate.format(), "bf16");
    let plain = variant(&base, |t| (0..layers).for_each(|layer| plain_experts(t, layer)));
    assert!(!open(&plain.0).unwrap().declared_w4a4(), "no NVFP4 expert at all");
    let unscaled = variant(&base, |t| {
        plain_experts(t, 1);
        t.remove("model.language_model.layers.2.mlp.experts.3.up_proj.input_scale");
    });
    assert!(!open(&unscaled.0).unwrap().declared_w4a4());
}

#[test]
fn a_global_scale_of_zero_is_an_expert_of_zeros() {
    let base = golden("tiny_nvfp4");
    let name = "model.language_model.layers.0.mlp.experts.1.up_proj";
    let dir = variant(&base, |t| t.get_mut(&format!("{name}.weight_scale_2")).unwrap().data = vec![0; 4]);
    let weights = open(&dir.0).unwrap().weights().unwrap();
    let MatrixData::Nvfp4 { weight_scale_2, .. } = weights.layers[0].moe.experts[1].up.data else { panic!() };
    assert_eq!(weight_scale_2, 0.0);
    // Its reciprocal is none.
    let dir = variant(&base, |t| {
        round_scales(t);
        to_compressed_tensors(t);
        t.get_mut(&format!("{name}.weight_global_scale")).unwrap().data = vec![0; 4];
    });
    let error = open(&dir.0).unwrap().weights().unwrap_err();
    assert!(
        error.kind() == ErrorKind::BadValue && error.to_string().contains("weight_global_scale"),
        "{error}"
    );
}

#[test]
fn a_head_beside_tied_embeddings_is_listed_once_with_what_to_do() {
    let dir = with_config(&golden("tiny_bf16"), |config| config["tie_word_embeddings"] = json!(true));
    let error = open(&dir.0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Census);
    assert_eq!(error.details().len(), 1, "{error}");
    let text = error.to_string();
    assert_eq!(text.matches("lm_head.weight").count(), 1, "{text}");
    assert!(text.contains("1 unexpected") && text.contains("set it to false"), "{text}");
}

#[test]
fn impossible_scales_name_their_tensor() {
    let expert = "model.language_model.layers.0.mlp.experts.1.up_proj";
    let bad = |name: String, change: &dyn Fn(&mut Tensor)| {
        let base = if name.ends_with("_inv") { "tiny_fp8" } else { "tiny_nvfp4" };
        let dir = variant(&golden(base), |t| change(t.get_mut(&name).unwrap()));
        let error = open(&dir.0).unwrap().weights().unwrap_err();
        assert!(error.kind() == ErrorKind::BadValue && error.to_string().contains(&name), "{error}");
    };
    for code in [0x7F, 0xFF, 0x81, 0xFE] {
        bad(format!("{expert}.weight_scale"), &|t| t.data[77] = code);
    }
    for value in [f32::NAN, f32::INFINITY, -1.0] {
        bad(format!("{expert}.weight_scale_2"), &|t| t.data = value.to_le_bytes().to_vec());
        bad(format!("{expert}.input_scale"), &|t| t.data = value.to_le_bytes().to_vec());
    }
    bad(format!("{expert}.input_scale"), &|t| t.data = vec![0; 4]);
    bad(format!("{expert}.weight_scale_inv"), &|t| t.data[2..4].copy_from_slice(&[0xC0, 0x7F]));
    bad("model.language_model.layers.0.linear_attn.A_log".into(), &|t| {
        t.data[..2].copy_from_slice(&[0x80, 0x7F])
    });
    for (shape, good) in [(&[][..], true), (&[1], true), (&[1, 1], false), (&[2], false)] {
        let dir = variant(&golden("tiny_nvfp4"), |t| {
            let count: usize = shape.iter().product();
            t.insert(format!("{expert}.weight_scale_2"), Tensor::f32(shape, &vec![0.25; count]));
        });
        let result = open(&dir.0);
        assert_eq!(result.is_ok(), good, "{shape:?}");
        if let Err(error) = result {
            assert!(
                error.to_string().contains("weight_scale_2") && error.to_string().contains("[] or [1]"),
                "{error}"
            );
        }
    }
}

#[test]
fn accepts_dense_variants() {
    let base = golden("tiny_fp8");
    let dir = variant(&base, |tensors| {
        // MLX order of a convolution, F32 scalars per head, an F32 norm, and block FP8 outside the experts.
        for (name, t) in tensors.iter_mut() {
            if name.ends_with("conv1d.weight") {
                t.shape.swap(1, 2);
            }
            if name.ends_with("A_log") || name.ends_with("hc_norm.weight") {
                let values: Vec<f32> = t
                    .data
                    .chunks_exact(2)
                    .map(|c| f32::from_bits(u32::from(u16::from_le_bytes([c[0], c[1]])) << 16))
                    .collect();
                *t = Tensor::f32(&t.shape, &values);
            }
        }
        let name = "model.language_model.layers.2.self_attn.o_proj";
        let o = tensors.get_mut(&format!("{name}.weight")).unwrap();
        o.dtype = "F8_E4M3".into();
        o.data = vec![0x38; o.shape[0] * o.shape[1]];
        tensors.insert(format!("{name}.weight_scale_inv"), Tensor::f32(&[2, 1], &[0.5, 2.0]));
    });
    let (want, got) = (open(&base).unwrap().weights().unwrap(), open(&dir.0).unwrap().weights().unwrap());
    let (Mixer::Gdn(a), Mixer::Gdn(b)) = (&want.layers[0].mixer, &got.layers[0].mixer) else { panic!() };
    assert_eq!((&a.conv, &a.a_log), (&b.conv, &b.a_log));
    assert_eq!(want.layers[0].attn_hc.norm, got.layers[0].attn_hc.norm);
    let Mixer::Attention(attention) = &got.layers[2].mixer else { panic!() };
    check_matrix(&attention.o, 256, 64);
    assert_eq!(attention.o.format(), "fp8-block");
}

#[test]
fn census_lists_everything() {
    let dir = variant(&golden("tiny_bf16"), |tensors| {
        tensors.remove("model.layers.0.linear_attn.A_log");
        for e in 0..12 {
            tensors.remove(&format!("model.layers.2.mlp.experts.{e}.up_proj.weight"));
        }
        tensors.insert("model.layers.9.extra.weight".into(), Tensor::f32(&[1], &[0.0]));
        tensors.insert("model.norm.weight".into(), Tensor::f32(&[1], &[0.0]));
        tensors.get_mut("model.layers.1.mlp.gate.weight").unwrap().shape = vec![64, 16];
        tensors.get_mut("model.layers.1.mlp.shared_expert_gate.weight").unwrap().dtype = "F16".into();
    });
    let error = open(&dir.0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Census);
    let text = error.to_string();
    for says in [
        "13 missing",
        "and 5 more",
        "A_log",
        "experts.0.up_proj.weight",
        "2 unexpected",
        "model.norm.weight",
        "1 of the wrong shape",
        "[64, 16], not [16, 64]",
        "1 of the wrong dtype",
        "F16, not BF16 or F32",
        "model.safetensors",
    ] {
        assert!(text.contains(says), "{text} does not say {says}");
    }
    assert_eq!(error.details().len(), 17);
    assert!(error.details().contains(&"missing: model.layers.2.mlp.experts.11.up_proj.weight".to_owned()));
}

#[test]
fn census_ignores_what_has_no_effect() {
    let dir = variant(&golden("tiny_bf16"), |tensors| {
        tensors.retain(|name, _| !name.starts_with("mtp."));
        let one = Tensor::f32(&[1], &[0.0]);
        for name in [
            "model.visual.blocks.0.attn.proj.weight",
            "visual.patch_embed.proj.weight",
            "model.layers.1.ple.ple_embedding.hashstats_mean",
            "model.layers.1.ple.ple_embedding.token_lookup",
            "model.hyper_connection_mixer.block_inject_weight.weight",
        ] {
            tensors.insert(name.into(), one.clone());
        }
    });
    let checkpoint = open(&dir.0).unwrap();
    assert!(checkpoint.weights().unwrap().mtp.is_none());
    let notes = checkpoint.notes().join("\n");
    for says in ["2 vision", "3 tensors without effect", "no draft head"] {
        assert!(notes.contains(says), "{notes}");
    }
    assert_eq!(checkpoint.notes().len(), 3);
    // A draft head with holes is not a missing one.
    let dir = variant(&golden("tiny_bf16"), |t| drop(t.remove("mtp.fc_hidden.weight")));
    assert!(open(&dir.0).unwrap_err().to_string().contains("1 missing: mtp.fc_hidden.weight"));
    let dir = with_config(&golden("tiny_bf16"), |c| c["mtp_num_hidden_layers"] = json!(0));
    let checkpoint = open(&dir.0).unwrap();
    assert!(checkpoint.weights().unwrap().mtp.is_none() && checkpoint.notes()[0].contains("31 draft head"));
}

/// A configuration of the largest sizes allowed beside a small file costs little.
#[test]
fn absurd_sizes_are_counted_not_kept() {
    let dir = with_config(&golden("tiny_bf16"), |c| {
        c.as_object_mut().unwrap().remove("layer_types");
        c["full_attention_interval"] = json!(4);
        c["num_hidden_layers"] = json!(512);
        c["num_experts"] = json!(2048);
    });
    let error = open(&dir.0).unwrap_err();
    assert!(error.kind() == ErrorKind::Census && error.to_string().len() < 6000, "{error}");
    assert!(error.details().len() < 150_000);
}

#[test]
fn tied_embeddings_need_no_head() {
    let base = golden("tiny_bf16");
    let both = with_config(&base, |c| c["tie_word_embeddings"] = json!(true));
    assert!(open(&both.0).unwrap_err().to_string().contains("lm_head.weight beside tie_word_embeddings"));
    let tied = variant(&base, |t| drop(t.remove("lm_head.weight")));
    assert!(open(&tied.0).unwrap_err().to_string().contains("1 missing: lm_head.weight"));
    let mut config = common::config_value(&base);
    config["tie_word_embeddings"] = json!(true);
    tied.write("config.json", config.to_string());
    let weights = open(&tied.0).unwrap().weights().unwrap();
    assert_eq!(bytes(&weights.lm_head), bytes(&weights.embed));
}

/// Two shards with an index.
fn sharded() -> (TempDir, serde_json::Value) {
    let base = golden("tiny_bf16");
    let (mut a, mut b) = (Tensors::new(), Tensors::new());
    let mut map = serde_json::Map::new();
    for (i, (name, t)) in read_dir(&base).into_iter().enumerate() {
        let (shard, file) =
            if i % 2 == 0 { (&mut a, "a-1.safetensors") } else { (&mut b, "a-2.safetensors") };
        map.insert(name.clone(), json!(file));
        shard.insert(name, t);
    }
    let dir = TempDir::new();
    dir.write("a-1.safetensors", encode(&a));
    dir.write("a-2.safetensors", encode(&b));
    dir.write("config.json", fs::read(base.join("config.json")).unwrap());
    (dir, json!({"metadata": {"total_size": 1}, "weight_map": map}))
}

#[track_caller]
fn index_refused(dir: &TempDir, index: &serde_json::Value, kind: ErrorKind, says: &[&str]) {
    dir.write("model.safetensors.index.json", index.to_string());
    let error = open(&dir.0).unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    for part in says {
        assert!(error.to_string().contains(part), "{error} does not say {part}");
    }
}

#[test]
fn shards_and_their_index() {
    let (dir, index) = sharded();
    open(&dir.0).unwrap();
    dir.write("model.safetensors.index.json", index.to_string());
    open(&dir.0).unwrap().weights().unwrap();
    let changed = |name: &str, file: serde_json::Value| {
        let mut index = index.clone();
        index["weight_map"][name] = file;
        index
    };
    for file in [
        "../a-1.safetensors",
        "/etc/a-1.safetensors",
        "x/../a-1.safetensors",
        "..",
        "",
        "a\\b.safetensors",
        "a-1.bin",
    ] {
        index_refused(
            &dir,
            &changed("lm_head.weight", json!(file)),
            ErrorKind::BadIndex,
            &["lm_head.weight", "plain name"],
        );
    }
    index_refused(&dir, &changed("lm_head.weight", json!(3)), ErrorKind::BadIndex, &["lm_head.weight"]);
    index_refused(
        &dir,
        &changed("ghost", json!("a-1.safetensors")),
        ErrorKind::BadIndex,
        &["ghost", "a-1.safetensors"],
    );
    let name = index["weight_map"].as_object().unwrap().iter().find(|e| e.1 == "a-1.safetensors").unwrap().0;
    index_refused(&dir, &changed(name, json!("a-2.safetensors")), ErrorKind::BadIndex, &[name, "it is in"]);
    index_refused(
        &dir,
        &changed("ghost", json!("a-9.safetensors")),
        ErrorKind::MissingFile,
        &["a-9.safetensors", "fetch"],
    );
    index_refused(&dir, &json!({"metadata": {}}), ErrorKind::BadIndex, &["weight_map"]);
    index_refused(&dir, &json!([]), ErrorKind::BadJson, &["index.json"]);
    dir.write(
        "model.safetensors.index.json",
        r#"{"weight_map":{"a":"a-1.safetensors","a":"a-2.safetensors"}}"#,
    );
    assert_eq!(open(&dir.0).unwrap_err().kind(), ErrorKind::Duplicate);
    dir.write("model.safetensors.index.json", index.to_string());
    fs::remove_file(dir.0.join("a-2.safetensors")).unwrap();
    let error = open(&dir.0).unwrap_err();
    assert!(
        error.kind() == ErrorKind::MissingFile && error.to_string().contains("a-2.safetensors"),
        "{error}"
    );
}

#[test]
fn a_tensor_in_two_files_is_an_error() {
    let (dir, _) = sharded();
    dir.write(
        "z.safetensors",
        encode(&Tensors::from([("lm_head.weight".into(), Tensor::f32(&[1], &[0.0]))])),
    );
    let error = open(&dir.0).unwrap_err();
    assert!(error.kind() == ErrorKind::Duplicate && error.to_string().contains("lm_head.weight"), "{error}");
    assert!(error.to_string().contains("z.safetensors"), "{error}");
    // Golden files beside a checkpoint are not part of it.
    fs::rename(dir.0.join("z.safetensors"), dir.0.join("golden-z.safetensors")).unwrap();
    open(&dir.0).unwrap();
}

#[test]
fn missing_and_damaged_files_are_named() {
    let error = open("no/such/directory").unwrap_err();
    assert!(
        error.kind() == ErrorKind::MissingFile && error.to_string().contains("no/such/directory"),
        "{error}"
    );
    let dir = TempDir::new();
    assert!(open(&dir.0).unwrap_err().to_string().contains("config.json"));
    dir.write("config.json", fs::read(tiny().join("config.json")).unwrap());
    let error = open(&dir.0).unwrap_err();
    assert!(error.kind() == ErrorKind::MissingFile && error.to_string().contains("safetensors"), "{error}");
    let good = fs::read(golden("tiny_bf16").join("model.safetensors")).unwrap();
    let dir = with_config(&golden("tiny_bf16"), |_| {});
    for len in [0, 5, 8, 1000, good.len() / 2, good.len() - 1] {
        dir.write("model.safetensors", &good[..len]);
        let error = open(&dir.0).unwrap_err();
        assert!(error.to_string().contains("model.safetensors"), "{error}");
    }
    static EMPTY: &[(&str, &[u8])] = &[];
    assert_eq!(Checkpoint::open(Source::Memory(EMPTY)).unwrap_err().kind(), ErrorKind::MissingFile);
    static TWICE: &[(&str, &[u8])] = &[("config.json", b"{}"), ("config.json", b"{}")];
    assert_eq!(Checkpoint::open(Source::Memory(TWICE)).unwrap_err().kind(), ErrorKind::Duplicate);
}
