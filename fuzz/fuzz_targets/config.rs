//! `config.json` and `generation_config.json`: no panic, whatever the text.
#![no_main]

use castiron_format::ngram::Hash;
use castiron_format::{Config, GenerationConfig};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(config) = Config::parse("fuzz", bytes) {
        let _ = Hash::derive(&config, 0);
        let _ = GenerationConfig::parse("fuzz", bytes, &config);
    }
});
