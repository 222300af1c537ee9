//! What makes text of the tiny checkpoint's 1024 ids: a tokenizer without merges, one id per byte, with the added
//! tokens of Qwen3.6, and a chat template with its form of turns.

use std::path::PathBuf;

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::tokenizer::{ADDED, spell, tokenizer_json};

/// Rows of the tiny checkpoint.
const IDS: u32 = 1024;
const END_OF_TEXT: u32 = IDS - 2;
const IM_END: u32 = IDS - 1;

const TEMPLATE: &str = include_str!("standin.jinja");

#[derive(clap::Args)]
pub struct Args {
    /// Directory to write the four files to.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../testdata/tiny"))]
    out: PathBuf,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    std::fs::create_dir_all(&args.out).with_context(|| format!("cannot make {}", args.out.display()))?;
    for (name, text) in files()? {
        let path = args.out.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn files() -> anyhow::Result<[(&'static str, String); 4]> {
    let config = json!({
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "TokenizersBackend",
    });
    let generation = json!({
        "do_sample": true,
        "eos_token_id": [IM_END, END_OF_TEXT],
        "pad_token_id": END_OF_TEXT,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    });
    Ok([
        ("tokenizer.json", tokenizer()?),
        ("tokenizer_config.json", serde_json::to_string_pretty(&config)? + "\n"),
        ("generation_config.json", serde_json::to_string_pretty(&generation)? + "\n"),
        ("chat_template.jinja", TEMPLATE.to_owned()),
    ])
}

/// Ids 0 to 255 are the bytes. The added tokens end at the last id, the end tokens behind the others.
fn tokenizer() -> anyhow::Result<String> {
    let vocab = (0..=255).map(|byte: u8| (spell(&[byte]), Value::from(byte))).collect();
    let ends = [("<|endoftext|>", END_OF_TEXT), ("<|im_end|>", IM_END)];
    let is_end = |text: &str| ends.iter().any(|(end, _)| *end == text);
    let others = ADDED.iter().filter(|(text, _)| !is_end(text));
    let first = END_OF_TEXT - (ADDED.len() - ends.len()) as u32;
    let added = others.zip(first..).map(|(&(text, special), id)| (id, text, special));
    tokenizer_json(vocab, Vec::new(), added.chain(ends.map(|(text, id)| (id, text, true))))
}

#[cfg(test)]
mod tests {
    #[test]
    fn stored_files_are_the_written_ones() {
        let stored = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../testdata/tiny"));
        for (name, text) in super::files().unwrap() {
            assert!(std::fs::read_to_string(stored.join(name)).unwrap() == text, "{name}: run cargo xtask standin");
        }
    }
}
