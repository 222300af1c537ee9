//! What the exported states of all backends have in common: exact reads, a checksum, and whose they are.

use std::io::Read;

use lily_model::Checkpoint;

use crate::{Error, Result};

/// Reads exactly; a short input is a damaged export, not an I/O failure.
pub fn read(from: &mut dyn Read, bytes: &mut [u8]) -> Result<()> {
    from.read_exact(bytes).map_err(|e| match e.kind() {
        std::io::ErrorKind::UnexpectedEof => Error::BadExport("it ends too early".into()),
        _ => Error::Io(e),
    })
}

/// A 64-bit sum that notices damage, not intent: words are mixed one after the other by a multiplication and a shift.
pub struct CheckSum(u64);

impl CheckSum {
    /// Of nothing.
    #[expect(clippy::new_without_default, reason = "an empty sum is a start, not a value")]
    pub fn new() -> CheckSum {
        CheckSum(0xCBF2_9CE4_8422_2325)
    }

    /// Goes on with these bytes; those of one call are padded to whole words.
    pub fn add(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        for word in words.iter().chain((!rest.is_empty()).then_some(&last)) {
            self.0 = (self.0 ^ u64::from_le_bytes(*word)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            self.0 ^= self.0 >> 32;
        }
    }

    /// The sum so far.
    pub fn value(&self) -> u64 {
        self.0
    }
}

/// A sum over `form`, which says what else an export depends on, the shape, the names and widths of all matrices, the norms, and
/// the first codes of every router: enough to tell checkpoints apart, while hardly a page of the file has to be read for it.
pub fn fingerprint(checkpoint: &Checkpoint, form: &str) -> u64 {
    const ROUTER_BYTES: usize = 256;
    let mut sum = CheckSum::new();
    sum.add(format!("{:?}{form}", checkpoint.config.shape).as_bytes());
    for matrix in checkpoint.weights.matrices() {
        sum.add(format!("{} {}", matrix.name, matrix.bits.count()).as_bytes());
    }
    for layer in &checkpoint.weights.layers {
        let codes = &layer.moe.router.codes;
        sum.add(&codes[..ROUTER_BYTES.min(codes.len())]);
        layer.mixer_norm.iter().chain(&layer.moe_norm).for_each(|x| sum.add(&x.to_le_bytes()));
    }
    sum.value()
}
