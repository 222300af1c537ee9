//! Any bytes as a safetensors file: no panic, and what is accepted lies in the file.

#![no_main]

use libfuzzer_sys::fuzz_target;
use lily_model::safetensors::parse_header;

fuzz_target!(|file: &[u8]| {
    if let Ok((start, header)) = parse_header(file) {
        for info in header.tensors().values() {
            let (from, to) = info.data_offsets;
            assert!(file.get(start + from..start + to).is_some());
        }
    }
});
