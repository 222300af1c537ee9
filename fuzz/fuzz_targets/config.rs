//! Any bytes as config.json and generation_config.json: no panic, and what is accepted has sizes that can be added up.

#![no_main]

use libfuzzer_sys::fuzz_target;
use lily_model::Config;
use lily_model::config::eos_of;

fuzz_target!(|json: &[u8]| {
    if let Ok(config) = Config::parse("config.json", json) {
        let shape = config.shape;
        assert!(shape.kv_bytes_per_token(4) > 0 || shape.attention_layers() == 0);
        assert!(shape.recurrent_bytes() >= 4 * shape.delta_state_len());
    }
    let _ = eos_of("generation_config.json", json);
});
