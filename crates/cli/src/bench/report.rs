//! The numbers for a person.

use super::measure::Start;
use super::record::Record;
use super::stat::Stat;
use crate::output::{bytes, grouped};

/// What holds for all contexts.
pub fn head(first: &Record, weights_bytes: usize) -> String {
    let m = &first.machine;
    let load = first.load_s.map_or_else(String::new, |seconds| format!(", loaded in {seconds:.2} s"));
    let commit = first.commit.as_deref().map_or_else(String::new, |commit| format!(", commit {commit}"));
    format!(
        "engine     {}{commit}\nmachine    {}, {} cores, {}, {}\ndevice     {}, KV cache in {}\nmodel      {}: {} layers, \
         vocabulary {}, {} of weights{load}",
        first.engine,
        m.cpu,
        m.cores,
        bytes(m.memory_bytes as usize),
        m.os,
        first.device,
        first.kv,
        first.model,
        first.shape.layers,
        grouped(first.shape.vocab),
        bytes(weights_bytes),
    )
}

/// The names of the columns.
pub fn columns() -> String {
    format!(
        "{:>9}  {:>26}  {:>24}  {:>9}  {:>13}  {:>6}  {:<16}",
        "context", "prefill tok/s", "decode tok/s", "per token", "GB/s, of read", "rounds", "tokens"
    )
}

/// The numbers of one context.
pub fn row(record: &Record) -> String {
    let prefill = match (&record.prefill_tok_s, record.start) {
        (Some(speed), Start::Prefill) => spread(speed),
        _ => "synthetic".into(),
    };
    let moved = record.token_bytes.total();
    format!(
        "{:>9}  {prefill:>26}  {:>24}  {:>9}  {:>13}  {:>6}  {:<16}",
        grouped(record.context),
        spread(&record.decode_tok_s),
        bytes(moved),
        format!("{:.1}, {:.0} %", moved as f64 * record.decode_tok_s.median / 1e9, 100.0 * record.read_share.median),
        record.decode_tok_s.rounds.len(),
        record.digest,
    )
}

/// `median (lowest to highest)`.
fn spread(stat: &Stat) -> String {
    format!("{} ({} to {})", speed(stat.median), speed(stat.min), speed(stat.max))
}

/// Three or four digits.
fn speed(x: f64) -> String {
    match x {
        x if x < 10.0 => format!("{x:.2}"),
        x if x < 1000.0 => format!("{x:.1}"),
        x => format!("{x:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::example;
    use super::*;

    #[test]
    fn rows_stand_under_their_columns() {
        let width = columns().len();
        for record in [example(64, Some(12.0), 9.0), example(131_072, None, 0.5), example(256, Some(98_765.0), 4321.0)]
        {
            assert_eq!(row(&record).len(), width, "{}", row(&record));
        }
        assert!(row(&example(64, Some(12.0), 9.0)).contains("9.00 (8.10 to 10.8)"));
    }
}
