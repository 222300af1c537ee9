//! The safetensors file format, written.

use std::io::{self, Write};

use serde_json::{Map, json};

use crate::fill::key;
use crate::layout::Spec;

/// How tensors lie in a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In the order of a hash of their names behind a header of odd length, so that no element is aligned: the
    /// published shards are like this.
    Misaligned,
    /// Words before half-words behind a padded header, so that each element is aligned.
    Aligned,
}

/// Bytes made and written at a time: few enough to stay in a core's cache, enough to keep system calls rare.
const BLOCK: usize = 1 << 20;

/// Writes one safetensors file that holds `shard`, 1 MiB at a time.
pub fn write_shard(to: &mut impl Write, mut shard: Vec<&Spec>, seed: u64, order: Order) -> io::Result<()> {
    match order {
        Order::Misaligned => shard.sort_by_key(|spec| key(0, &spec.name)),
        Order::Aligned => shard.sort_by_key(|spec| std::cmp::Reverse(spec.fill.element_bytes())),
    }
    to.write_all(&header(&shard, order)?)?;
    let mut block = vec![0; BLOCK];
    for spec in shard {
        let key = key(seed, &spec.seed_name);
        for start in (0..spec.bytes()).step_by(BLOCK) {
            let block = &mut block[..BLOCK.min(spec.bytes() - start)];
            spec.fill.write(key, start, block);
            to.write_all(block)?;
        }
    }
    Ok(())
}

/// The length and the JSON of a safetensors header, padded with spaces to the alignment that `order` asks for.
fn header(shard: &[&Spec], order: Order) -> io::Result<Vec<u8>> {
    let mut entries = Map::new();
    entries.insert("__metadata__".into(), json!({"format": "mlx"}));
    let mut start = 0;
    for spec in shard {
        let end = start + spec.bytes();
        let entry = json!({"dtype": spec.dtype(), "shape": spec.dims, "data_offsets": [start, end]});
        entries.insert(spec.name.clone(), entry);
        start = end;
    }
    let mut json = serde_json::to_vec(&entries)?;
    let padded = match order {
        Order::Misaligned => json.len() | 1,
        Order::Aligned => (8 + json.len()).next_multiple_of(64) - 8,
    };
    json.resize(padded, b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok(header)
}
