//! Safetensors headers: no panic, and nothing accepted that the reference implementation refuses.
#![no_main]

use castiron_format::safetensors::read_header;
use libfuzzer_sys::fuzz_target;
use safetensors::SafeTensors;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(header) = read_header("fuzz", bytes) {
        let reference = SafeTensors::deserialize(bytes).expect("the reference accepts what we accept");
        for tensor in &header.tensors {
            let view = reference.tensor(&tensor.name).expect("same names");
            assert_eq!(view.data(), &bytes[tensor.range.clone()]);
        }
    }
});
