//! Text to token ids and back.
//!
//! One tokenizer: byte-level BPE as Qwen3.6 uses it. NFC, then a split by [`SPLIT_PATTERN`], then the merges of the
//! file on each piece. The parts come from the `tokenizers` crate; `tokenizer.json` is read here, because other
//! kinds of tokenizers must be refused by name and broken files must not reach code that trusts them.
//!
//! *Added tokens* (`<|im_end|>`, `<think>`, ...) are ids that no merge makes: they are cut out of the text first, the
//! longest at each place, and the stretches between are encoded each on its own. The three encoders differ in where
//! they cut:
//!
//! - [`Tokenizer::encode_stock`] cuts at every occurrence, as other tools do. Never for text from outside.
//! - [`Tokenizer::encode_text`] cuts nowhere.
//! - [`Tokenizer::encode_rendered`] cuts at the occurrences that the chat template wrote from its first to its last
//!   byte (see [`crate::chat`]). A stretch runs from one such cut to the next, template's words and message text
//!   together, so the ids equal the stock ones whenever no message holds an added token.

mod file;

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};
use serde::Deserialize;
use serde_json::Value;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::utils::SysRegex;
use tokenizers::{Model, NormalizedString};

use crate::chat::Rendered;
use file::File;

/// How Qwen3.6 splits text before merging, by Oniguruma's rules. Combining marks belong to words, and each digit
/// stands alone.
pub const SPLIT_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// More ids than any checkpoint of this architecture has rows; bounds the table that a broken file can ask for.
const MAX_IDS: u32 = 1 << 20;

/// The longest run of whitespace. The pattern tries such a run once per character, and Oniguruma gives up (the
/// binding: panics) after ten million tries at one place.
const MAX_SPACE_BYTES: usize = 1 << 20;

/// Why a tokenizer could not be read, or a text not be encoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenizerError {
    /// A file is not the JSON it should be.
    #[error("{file}: {problem}")]
    Json {
        /// Name of the file.
        file: &'static str,
        /// What is wrong, and where.
        problem: String,
    },
    /// `tokenizer.json` describes another kind of tokenizer.
    #[error("tokenizer.json: {field} is {found}, expected {expected} (not a tokenizer of Qwen3.6)")]
    Unsupported {
        /// Path in the file.
        field: String,
        /// What is there.
        found: String,
        /// What this engine can do.
        expected: String,
    },
    /// The parts of `tokenizer.json` do not fit together.
    #[error("tokenizer.json: {0}")]
    Inconsistent(String),
    /// The text has a run of whitespace that the split pattern cannot take.
    #[error("the text has {bytes} bytes of whitespace in a row, more than the {MAX_SPACE_BYTES} that can be encoded")]
    TooMuchSpace {
        /// Length of the run.
        bytes: usize,
    },
    /// The `tokenizers` crate failed.
    #[error("tokenizer: {0}")]
    Library(String),
}

/// A token that text does not merge to.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AddedToken {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub content: String,
    /// Whether it is left out of text for people. Not so for the think and tool tags.
    #[serde(default)]
    pub special: bool,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

/// The ids of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PromptIds {
    /// One id per token.
    pub ids: Vec<u32>,
    /// For each of [`Rendered::turn_starts`], the number of tokens before it.
    pub turn_starts: Vec<usize>,
    /// Likewise for [`Rendered::assistant_starts`].
    pub assistant_starts: Vec<usize>,
}

/// A tokenizer. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer(Arc<Parts>);

struct Parts {
    bpe: BPE,
    split: SysRegex,
    /// Sorted by id.
    added: Vec<AddedToken>,
    /// Finds `added`, by index.
    cutter: AhoCorasick,
    bytes: Bytes,
    eos: Option<u32>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).field("eos", &self.0.eos).finish()
    }
}

impl Tokenizer {
    /// Reads the bytes of a checkpoint's `tokenizer.json` and, for the end token, its `tokenizer_config.json`.
    ///
    /// # Errors
    /// Any [`TokenizerError`] but [`TokenizerError::TooMuchSpace`].
    pub fn from_json(tokenizer_json: &[u8], tokenizer_config: Option<&[u8]>) -> Result<Tokenizer, TokenizerError> {
        let File { mut added_tokens, model, .. } = File::read(tokenizer_json)?;
        let bytes = Bytes::new(&model.vocab, &added_tokens)?;
        let bpe = model.build()?;
        added_tokens.sort_unstable_by_key(|token| token.id);
        let cutter = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(added_tokens.iter().map(|token| &token.content))
            .map_err(library)?;
        let split = SysRegex::new(SPLIT_PATTERN).map_err(library)?;
        let mut parts = Parts { bpe, split, added: added_tokens, cutter, bytes, eos: None };
        parts.eos = tokenizer_config.map(|config| parts.read_eos(config)).transpose()?.flatten();
        Ok(Tokenizer(Arc::new(parts)))
    }

    /// Cuts at all added tokens, also in text from outside: what other tools make of a rendered prompt.
    ///
    /// # Errors
    /// [`TokenizerError::TooMuchSpace`].
    pub fn encode_stock(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        Ok(self.encode_rendered(&Rendered::by_hand(text))?.ids)
    }

    /// Knows no added tokens: what they spell is text like any other.
    ///
    /// # Errors
    /// [`TokenizerError::TooMuchSpace`].
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        self.encode_stretch(text, &mut ids)?;
        Ok(ids)
    }

    /// Cuts at the added tokens that the chat template wrote.
    ///
    /// # Errors
    /// [`TokenizerError::TooMuchSpace`].
    pub fn encode_rendered(&self, rendered: &Rendered) -> Result<PromptIds, TokenizerError> {
        let text = rendered.text();
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut turns = rendered.turn_starts().into_iter().peekable();
        let mut assistants = rendered.assistant_starts().into_iter().peekable();
        let (mut turn_starts, mut assistant_starts) = (Vec::new(), Vec::new());
        let mut done = 0;
        for (cut, id) in self.cuts(rendered) {
            self.encode_stretch(&text[done..cut.start], &mut ids)?;
            turn_starts.extend(turns.next_if_eq(&cut.start).map(|_| ids.len()));
            assistant_starts.extend(assistants.next_if_eq(&cut.start).map(|_| ids.len()));
            ids.push(id);
            done = cut.end;
        }
        self.encode_stretch(&text[done..], &mut ids)?;
        Ok(PromptIds { ids, turn_starts, assistant_starts })
    }

    /// The added tokens to cut out of a prompt.
    fn cuts<'a>(&'a self, rendered: &'a Rendered) -> impl Iterator<Item = (Range<usize>, u32)> + 'a {
        rendered.written_by_template().flat_map(move |range| {
            self.0.cutter.find_iter(&rendered.text()[range.clone()]).map(move |found| {
                let cut = range.start + found.start()..range.start + found.end();
                (cut, self.0.added[found.pattern().as_usize()].id)
            })
        })
    }

    fn encode_stretch(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        if text.is_empty() {
            return Ok(());
        }
        let composed;
        let text = if text.is_ascii() {
            text
        } else {
            let mut normalized = NormalizedString::from(text);
            normalized.nfc();
            composed = normalized.get().to_owned();
            &composed
        };
        let bytes = longest_space(text);
        if bytes > MAX_SPACE_BYTES {
            return Err(TokenizerError::TooMuchSpace { bytes });
        }
        let mut piece = String::new();
        let mut done = 0;
        for (start, end) in self.0.split.find_iter(text).chain([(text.len(), text.len())]) {
            for range in [done..start, start..end] {
                piece.clear();
                piece.extend(text[range].bytes().map(byte_char));
                ids.extend(self.0.bpe.tokenize(&piece).map_err(library)?.into_iter().map(|token| token.id));
            }
            done = end;
        }
        Ok(())
    }

    /// The text of `ids`. Bytes that are no UTF-8 become U+FFFD, ids without a token are left out, and so are
    /// special tokens if `skip_special`.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut detokenizer = Detokenizer::new(self, skip_special);
        let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        text.push_str(&detokenizer.flush());
        text
    }

    /// The bytes that the token stands for; an added token's are its text. `None` if no token has this id: the
    /// checkpoint may have a row for it, but the model must never be made to choose it.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.0.bytes.get(id)
    }

    /// The id of an added token's text, or of a token's bytes.
    pub fn token_id(&self, bytes: &[u8]) -> Option<u32> {
        let added = self.0.added.iter().find(|token| token.content.as_bytes() == bytes);
        added.map(|token| token.id).or_else(|| {
            let name: String = bytes.iter().copied().map(byte_char).collect();
            self.0.bpe.token_to_id(&name)
        })
    }

    /// One more than the highest id that has a token. Ids below may be without one.
    pub fn vocab_size(&self) -> usize {
        self.0.bytes.spans.len()
    }

    /// The added tokens, by ascending id.
    pub fn added_tokens(&self) -> &[AddedToken] {
        &self.0.added
    }

    /// The added token with this id.
    pub fn added_token(&self, id: u32) -> Option<&AddedToken> {
        self.0.added.binary_search_by_key(&id, |token| token.id).ok().map(|at| &self.0.added[at])
    }

    /// Whether the id is of a special token, which text for people leaves out.
    pub fn is_special(&self, id: u32) -> bool {
        self.added_token(id).is_some_and(|token| token.special)
    }

    /// The id of `eos_token` in `tokenizer_config.json`.
    pub fn eos(&self) -> Option<u32> {
        self.0.eos
    }
}

impl Parts {
    fn read_eos(&self, config: &[u8]) -> Result<Option<u32>, TokenizerError> {
        let bad = |problem: String| TokenizerError::Json { file: "tokenizer_config.json", problem };
        let config: Value = serde_json::from_slice(config).map_err(|error| bad(error.to_string()))?;
        let token = match &config["eos_token"] {
            Value::Null => return Ok(None),
            Value::Object(token) => token.get("content").and_then(Value::as_str),
            token => token.as_str(),
        };
        let token = token.ok_or_else(|| bad(format!("eos_token is {}, expected a token", config["eos_token"])))?;
        match self.added.iter().find(|added| added.content == token) {
            Some(added) => Ok(Some(added.id)),
            None => Err(bad(format!("eos_token is {token:?}, which is no added token of tokenizer.json"))),
        }
    }
}

fn library(error: impl fmt::Display) -> TokenizerError {
    TokenizerError::Library(error.to_string())
}

/// The length in bytes of the longest run of whitespace.
fn longest_space(text: &str) -> usize {
    if text.len() <= MAX_SPACE_BYTES {
        return 0;
    }
    text.split(|c: char| !c.is_whitespace()).map(str::len).max().unwrap_or(0)
}

/// The printable stand-in for a byte in `tokenizer.json`, as GPT-2 chose it: Latin-1's printable characters stand for
/// themselves, the other 68 bytes are counted up from U+0100.
pub fn byte_char(byte: u8) -> char {
    let stand_in = match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => u32::from(byte),
        0..=b' ' => 0x100 + u32::from(byte),
        0x7F..=0xA0 => 0x121 + u32::from(byte - 0x7F),
        0xAD => 0x143,
    };
    // All of these are characters of Latin-1 or Latin Extended-A.
    char::from_u32(stand_in).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The byte for which a character stands.
fn char_byte(c: char) -> Option<u8> {
    let byte = match u32::from(c) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => code,
        code @ 0x100..=0x120 => code - 0x100,
        code @ 0x121..=0x142 => code - 0x121 + 0x7F,
        0x143 => 0xAD,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// The bytes of every token, end to end.
struct Bytes {
    all: Vec<u8>,
    /// By id.
    spans: Vec<Option<Range<u32>>>,
}

impl Bytes {
    fn new(vocab: &Vocab, added: &[AddedToken]) -> Result<Bytes, TokenizerError> {
        let missing = (0..=255u8).find(|&byte| !vocab.contains_key(byte_char(byte).encode_utf8(&mut [0; 4])));
        if let Some(byte) = missing {
            let problem = format!("the vocabulary has no token for the byte {byte:#04x}, so not every text has ids");
            return Err(TokenizerError::Inconsistent(problem));
        }
        let mut bytes = Bytes { all: Vec::new(), spans: Vec::new() };
        let mut names: Vec<Option<&str>> = Vec::new();
        let mut added_ids = HashSet::new();
        let tokens = vocab.iter().map(|(name, &id)| (name.as_str(), id, false));
        for (name, id, is_added) in tokens.chain(added.iter().map(|token| (token.content.as_str(), token.id, true))) {
            if id >= MAX_IDS {
                let problem = format!("token {name:?} has id {id}, more than the {MAX_IDS} that any checkpoint has");
                return Err(TokenizerError::Inconsistent(problem));
            }
            let at = id as usize;
            if names.len() <= at {
                names.resize(at + 1, None);
            }
            match names[at].replace(name) {
                None => bytes.set(at, name),
                // A vocabulary may list its added tokens, too.
                Some(other) if other == name && is_added => {}
                Some(other) => {
                    let problem = format!("id {id} belongs to both {other:?} and {name:?}");
                    return Err(TokenizerError::Inconsistent(problem));
                }
            }
            if is_added && !added_ids.insert(id) {
                return Err(TokenizerError::Inconsistent(format!("the added token {name:?} is there twice")));
            }
        }
        Ok(bytes)
    }

    fn set(&mut self, id: usize, name: &str) {
        if self.spans.len() <= id {
            self.spans.resize(id + 1, None);
        }
        let start = self.all.len();
        self.all.extend(name.chars().filter_map(char_byte));
        if name.chars().any(|c| char_byte(c).is_none()) {
            self.all.truncate(start);
            self.all.extend(name.as_bytes());
        }
        self.spans[id] = Some(start as u32..self.all.len() as u32);
    }

    fn get(&self, id: u32) -> Option<&[u8]> {
        let span = self.spans.get(id as usize)?.clone()?;
        Some(&self.all[span.start as usize..span.end as usize])
    }
}

/// Turns ids into text as they come.
///
/// A token can end in the middle of a character. What [`push`](Self::push) and [`flush`](Self::flush) return is, put
/// together, what `String::from_utf8_lossy` makes of all bytes; no piece holds half a character, and U+FFFD comes
/// only where the bytes can no longer become one.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// The start of a character: at most three bytes.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// Starts a text. With `skip_special`, special tokens add nothing to it.
    pub fn new(tokenizer: &Tokenizer, skip_special: bool) -> Detokenizer {
        Detokenizer { tokenizer: tokenizer.clone(), skip_special, pending: Vec::new() }
    }

    /// The text that is complete with this token. Ids without a token add nothing.
    pub fn push(&mut self, id: u32) -> String {
        match self.tokenizer.token_bytes(id) {
            Some(bytes) if !(self.skip_special && self.tokenizer.is_special(id)) => {
                self.pending.extend_from_slice(bytes);
            }
            _ => return String::new(),
        }
        let mut text = String::new();
        let mut done = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            let is_last = done + chunk.invalid().len() == self.pending.len();
            if is_last && is_start_of_char(chunk.invalid()) {
                break;
            }
            if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
                done += chunk.invalid().len();
            }
        }
        self.pending.drain(..done);
        text
    }

    /// Ends the text: U+FFFD if it stops within a character, else nothing. The next push starts a new text.
    pub fn flush(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }

    /// The bytes that wait for the rest of their character.
    pub fn pending(&self) -> &[u8] {
        &self.pending
    }
}

/// Whether more bytes can make `bytes` a character.
fn is_start_of_char(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
