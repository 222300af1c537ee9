//! `tokenizer.json`: the form of the one kind of tokenizer that this engine has, and why another is not it.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, SeqAccess, Visitor};
use serde_json::{Map, Value};
use tokenizers::models::bpe::{BPE, Vocab};

use super::{AddedToken, SPLIT_PATTERN, TokenizerError, library};

/// The file, all but its merges checked.
#[derive(Deserialize)]
pub(super) struct File {
    #[serde(default)]
    pub(super) added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    pub(super) model: BpeFile,
}

#[derive(Deserialize)]
pub(super) struct BpeFile {
    pub(super) vocab: Vocab,
    merges: Vec<Merge>,
    #[serde(flatten)]
    options: Map<String, Value>,
}

/// `["a", "b"]`, or `"a b"` in older files.
struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Merge, D::Error> {
        struct Pair;
        impl<'de> Visitor<'de> for Pair {
            type Value = Merge;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a pair of tokens")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Merge, E> {
                let (a, b) = text.split_once(' ').ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))?;
                Ok(Merge(a.to_owned(), b.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Merge, A::Error> {
                match (seq.next_element()?, seq.next_element()?, seq.next_element::<de::IgnoredAny>()?) {
                    (Some(a), Some(b), None) => Ok(Merge(a, b)),
                    _ => Err(de::Error::custom("a merge does not have two tokens")),
                }
            }
        }
        deserializer.deserialize_any(Pair)
    }
}

impl File {
    pub(super) fn read(json: &[u8]) -> Result<File, TokenizerError> {
        let file: File = serde_json::from_slice(json).map_err(|error| File::explain(json, &error))?;
        let split = "/pretokenizers/0";
        let bytes = "/pretokenizers/1";
        let expected = [
            ("normalizer", &file.normalizer, "/type".to_owned(), Value::from("NFC")),
            ("pre_tokenizer", &file.pre_tokenizer, "/type".to_owned(), "Sequence".into()),
            ("pre_tokenizer", &file.pre_tokenizer, format!("{split}/type"), "Split".into()),
            ("pre_tokenizer", &file.pre_tokenizer, format!("{split}/pattern/Regex"), SPLIT_PATTERN.into()),
            ("pre_tokenizer", &file.pre_tokenizer, format!("{split}/behavior"), "Isolated".into()),
            ("pre_tokenizer", &file.pre_tokenizer, format!("{split}/invert"), false.into()),
            ("pre_tokenizer", &file.pre_tokenizer, format!("{bytes}/type"), "ByteLevel".into()),
            ("pre_tokenizer", &file.pre_tokenizer, format!("{bytes}/add_prefix_space"), false.into()),
            ("pre_tokenizer", &file.pre_tokenizer, format!("{bytes}/use_regex"), false.into()),
            ("pre_tokenizer", &file.pre_tokenizer, "/pretokenizers/2".to_owned(), Value::Null),
            ("decoder", &file.decoder, "/type".to_owned(), "ByteLevel".into()),
        ];
        for (part, value, path, expected) in expected {
            let found = value.pointer(&path).unwrap_or(&Value::Null);
            if *found != expected {
                return Err(unsupported(part.to_owned() + &path.replace('/', "."), found, &expected.to_string()));
            }
        }
        for token in &file.added_tokens {
            let flags = [("single_word", token.single_word), ("lstrip", token.lstrip), ("rstrip", token.rstrip)];
            if let Some((flag, _)) = flags.iter().find(|(_, on)| *on) {
                let field = format!("{flag} of the added token {:?}", token.content);
                return Err(unsupported(field, &true.into(), "false"));
            }
            if token.content.is_empty() {
                return Err(TokenizerError::Inconsistent(format!("the added token {} has no text", token.id)));
            }
        }
        Ok(file)
    }

    /// Another model's vocabulary has another form: then its type says more than the place of the first difference.
    fn explain(json: &[u8], error: &serde_json::Error) -> TokenizerError {
        #[derive(Deserialize)]
        struct Typed {
            model: Type,
        }
        #[derive(Deserialize)]
        struct Type {
            r#type: String,
        }
        match serde_json::from_slice(json) {
            Ok(Typed { model: Type { r#type } }) if r#type != "BPE" => {
                unsupported("model.type".to_owned(), &r#type.into(), "\"BPE\"")
            }
            _ => TokenizerError::Json { file: "tokenizer.json", problem: error.to_string() },
        }
    }
}

fn unsupported(field: String, found: &Value, expected: &str) -> TokenizerError {
    let found = match found {
        Value::Null => "missing".to_owned(),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        other => other.to_string(),
    };
    TokenizerError::Unsupported { field, found, expected: expected.to_owned() }
}

impl BpeFile {
    pub(super) fn build(self) -> Result<BPE, TokenizerError> {
        for (name, value) in &self.options {
            // Each of these changes what the merges do; switched off they are null, false or empty.
            let is_off = matches!(value, Value::Null | Value::Bool(false)) || value == "";
            match name.as_str() {
                "type" if value != "BPE" => return Err(unsupported("model.type".to_owned(), value, "\"BPE\"")),
                "type" => {}
                _ if is_off => {}
                _ => return Err(unsupported(format!("model.{name}"), value, "none")),
            }
        }
        // The library's builder panics on some merges that this loop refuses.
        let mut merged = String::new();
        for Merge(a, b) in &self.merges {
            merged.clear();
            merged.extend([a.as_str(), b]);
            if let Some(token) = [a, b, &merged].into_iter().find(|&token| !self.vocab.contains_key(token)) {
                let problem =
                    format!("the merge of {a:?} and {b:?} needs {token:?}, which the vocabulary does not have");
                return Err(TokenizerError::Inconsistent(problem));
            }
        }
        let merges = self.merges.into_iter().map(|Merge(a, b)| (a, b)).collect();
        BPE::builder().vocab_and_merges(self.vocab, merges).build().map_err(library)
    }
}
