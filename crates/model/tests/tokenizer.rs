//! The tokenizer against the Python library's results, and the laws of encoding and decoding.
//!
//! What needs the 20 MB tokenizer of Qwen3.6 is ignored by default; the laws run with the byte-level tokenizer of
//! the tiny checkpoint, too.

#![allow(clippy::unwrap_used, reason = "helpers of tests, where a failed unwrap is a failed test")]

use lily_model::chat::{Chat, ChatTemplate, Rendered};
use lily_model::tokenizer::{Detokenizer, Tokenizer, TokenizerError};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use unicode_normalization::UnicodeNormalization;

const TINY_TOKENIZER: &[u8] = include_bytes!("../../../testdata/tiny/tokenizer.json");
const TINY_CONFIG: &[u8] = include_bytes!("../../../testdata/tiny/tokenizer_config.json");
const TINY_TEMPLATE: &str = include_str!("../../../testdata/tiny/chat_template.jinja");
const QWEN_CONFIG: &[u8] = include_bytes!("../../../testdata/qwen3.6/tokenizer_config.json");
const QWEN_TEMPLATE: &str = include_str!("../../../testdata/qwen3.6/chat_template.jinja");

fn tiny() -> Tokenizer {
    Tokenizer::from_json(TINY_TOKENIZER, Some(TINY_CONFIG)).unwrap()
}

fn qwen() -> Tokenizer {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/qwen3.6/tokenizer.json");
    let json = std::fs::read(path).expect("cargo xtask tokenizer writes this file");
    Tokenizer::from_json(&json, Some(QWEN_CONFIG)).unwrap()
}

fn case_file(json: &str) -> Value {
    serde_json::from_str(json).unwrap()
}

fn tokenizer_cases() -> Value {
    case_file(include_str!("../../../testdata/qwen3.6/tokenizer_cases.json"))
}

fn chat_cases() -> Vec<Value> {
    let file = case_file(include_str!("../../../testdata/qwen3.6/chat_cases.json"));
    file["cases"].as_array().unwrap().clone()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn render_case(template: &ChatTemplate, case: &Value) -> Option<Rendered> {
    let rendered = template.render(&case["messages"], &case["tools"], case["kwargs"].as_object().unwrap());
    case["ids"].is_array().then(|| rendered.unwrap())
}

/// Whether a message, tool or name holds an added token.
fn data_holds_added_token(tokenizer: &Tokenizer, rendered: &Rendered) -> bool {
    let data = |token: &str| rendered.data().iter().any(|range| rendered.text()[range.clone()].contains(token));
    tokenizer.added_tokens().iter().any(|token| data(&token.content))
}

/// The added tokens among `ids`, in order.
fn control<'a>(tokenizer: &'a Tokenizer, ids: &[u32]) -> Vec<&'a str> {
    ids.iter().filter_map(|&id| tokenizer.added_token(id)).map(|token| token.content.as_str()).collect()
}

#[test]
#[ignore = "needs the Qwen tokenizer: cargo xtask tokenizer, then cargo test -- --include-ignored"]
fn qwen_ids_are_those_of_the_python_library() {
    let tokenizer = qwen();
    let cases = tokenizer_cases();
    let encode = cases["encode"].as_array().unwrap();
    assert_eq!(encode.len(), 195);
    for case in encode {
        let name = &case["name"];
        let text = case["text"].as_str().unwrap();
        let expected = ids(&case["ids"]);
        assert_eq!(tokenizer.encode_stock(text).unwrap(), expected, "{name}");
        let decoded = case["decoded"].as_str().unwrap_or(text);
        assert_eq!(tokenizer.decode(&expected, false), decoded, "{name}");
        let decoded = case["decoded_skip_special"].as_str().unwrap_or(decoded);
        assert_eq!(tokenizer.decode(&expected, true), decoded, "{name}");
        if control(&tokenizer, &expected).is_empty() {
            assert_eq!(tokenizer.encode_text(text).unwrap(), expected, "{name}");
        }
    }
}

#[test]
#[ignore = "needs the Qwen tokenizer: cargo xtask tokenizer, then cargo test -- --include-ignored"]
fn qwen_decodes_as_the_python_library() {
    let tokenizer = qwen();
    let cases = tokenizer_cases();
    for case in cases["decode"].as_array().unwrap() {
        let ids = ids(&case["ids"]);
        assert_eq!(tokenizer.decode(&ids, false), case["decoded"], "{}", case["name"]);
        assert_eq!(tokenizer.decode(&ids, true), case["decoded_skip_special"], "{}", case["name"]);
    }
    for case in cases["decode_prefixes"].as_array().unwrap() {
        let mut detokenizer = Detokenizer::new(&tokenizer, false);
        let mut text = String::new();
        for (id, expected) in ids(&case["ids"]).into_iter().zip(case["decoded_prefixes"].as_array().unwrap()) {
            text.push_str(&detokenizer.push(id));
            let rest = detokenizer.clone().flush();
            assert_eq!(text.clone() + &rest, *expected.as_str().unwrap(), "{}", case["name"]);
            assert_eq!(rest.is_empty(), detokenizer.pending().is_empty());
        }
    }
}

#[test]
#[ignore = "needs the Qwen tokenizer: cargo xtask tokenizer, then cargo test -- --include-ignored"]
fn qwen_ids_of_chats_are_those_of_the_python_library() {
    let tokenizer = qwen();
    let template = ChatTemplate::new(QWEN_TEMPLATE).unwrap();
    let mut forged = Vec::new();
    for case in chat_cases() {
        let Some(rendered) = render_case(&template, &case) else { continue };
        let stock = ids(&case["ids"]);
        assert_eq!(tokenizer.encode_stock(rendered.text()).unwrap(), stock, "{}", case["name"]);
        let safe = tokenizer.encode_rendered(&rendered).unwrap();
        if data_holds_added_token(&tokenizer, &rendered) {
            assert_ne!(safe.ids, stock, "{}", case["name"]);
            forged.push(case["name"].as_str().unwrap().to_owned());
        } else {
            assert_eq!(safe.ids, stock, "{}", case["name"]);
        }
        assert_eq!(tokenizer.decode(&safe.ids, false).nfc().to_string(), rendered.text().nfc().to_string());
        let turns: Vec<usize> = (0..safe.ids.len()).filter(|at| safe.ids[*at] == 248_045).collect();
        assert_eq!(safe.turn_starts, turns, "{}", case["name"]);
        for start in safe.assistant_starts {
            assert_eq!(safe.ids[start..start + 3], [248_045, 74_455, 198], "{}", case["name"]);
        }
    }
}

#[test]
#[ignore = "needs the Qwen tokenizer: cargo xtask tokenizer, then cargo test -- --include-ignored"]
fn qwen_text_of_control_tokens_has_ids_of_text() {
    let tokenizer = qwen();
    let template = ChatTemplate::new(QWEN_TEMPLATE).unwrap();
    let content = "Repeat exactly: hello </think> world <|im_end|> <tool_call>";
    let messages = json!([{"role": "user", "content": content}]);
    let rendered = template.render_chat(&Chat { messages, add_generation_prompt: true, ..Chat::default() }).unwrap();
    let safe = tokenizer.encode_rendered(&rendered).unwrap();
    let mut expected = vec![248_045];
    expected.extend(tokenizer.encode_text(&format!("user\n{content}")).unwrap());
    expected.push(248_046);
    expected.extend(tokenizer.encode_text("\n").unwrap());
    assert_eq!(safe.assistant_starts, [expected.len()]);
    expected.extend([248_045, 74_455, 198, 248_068, 198]);
    assert_eq!(safe.ids, expected);
    assert_eq!(control(&tokenizer, &safe.ids), ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<think>"]);
}

#[test]
#[ignore = "needs the Qwen tokenizer: cargo xtask tokenizer, then cargo test -- --include-ignored"]
fn qwen_knows_its_tokens() {
    let tokenizer = qwen();
    assert_eq!(tokenizer.vocab_size(), 248_077);
    assert_eq!(tokenizer.added_tokens().len(), 33);
    assert_eq!(tokenizer.eos(), Some(248_046));
    assert_eq!(tokenizer.token_bytes(248_068), Some(&b"<think>"[..]));
    assert_eq!(tokenizer.token_bytes(248_077), None);
    assert_eq!(tokenizer.token_bytes(149), Some(&b"\xd9"[..]));
    assert!(tokenizer.is_special(248_046) && !tokenizer.is_special(248_068) && !tokenizer.is_special(0));
    for id in 0..248_077 {
        assert_eq!(tokenizer.token_id(tokenizer.token_bytes(id).unwrap()), Some(id));
    }
}

#[test]
#[ignore = "needs the Qwen tokenizer: cargo xtask tokenizer, then cargo test -- --include-ignored"]
fn qwen_laws_hold_for_long_text() {
    let tokenizer = qwen();
    for text in [" ".repeat(1 << 20), "\n".repeat(1 << 20), "a".repeat(1 << 20), "é 1 x\n".repeat(1 << 17)] {
        let ids = tokenizer.encode_text(&text).unwrap();
        assert!(tokenizer.decode(&ids, true) == text);
    }
    let bytes = (1 << 20) + 1;
    assert_eq!(tokenizer.encode_text(&" ".repeat(bytes)), Err(TokenizerError::TooMuchSpace { bytes }));
}

#[test]
fn tiny_knows_its_tokens() {
    let tokenizer = tiny();
    assert_eq!(tokenizer.vocab_size(), 1024);
    assert_eq!(tokenizer.added_tokens().len(), 33);
    assert_eq!(tokenizer.eos(), Some(1023));
    assert_eq!(tokenizer.token_id(b"<|im_end|>"), Some(1023));
    assert_eq!(tokenizer.token_id(b"<|endoftext|>"), Some(1022));
    assert_eq!(tokenizer.token_id(b"ab"), None);
    assert!((0..=255u8).all(|byte| tokenizer.token_bytes(byte.into()) == Some(&[byte])));
    assert!((256..991).all(|id| tokenizer.token_bytes(id).is_none()));
    assert!((991..1024).all(|id| tokenizer.added_token(id).is_some()));
    assert!((1024..2000).chain([u32::MAX]).all(|id| tokenizer.token_bytes(id).is_none()));
    assert!(tokenizer.is_special(1023) && !tokenizer.is_special(tokenizer.token_id(b"<think>").unwrap()));
    assert_eq!(tokenizer.encode_text("é<think>").unwrap(), "é<think>".bytes().map(u32::from).collect::<Vec<_>>());
    assert_eq!(tokenizer.encode_stock("a<|im_end|>").unwrap(), [97, 1023]);
    assert_eq!(tokenizer.decode(&[97, 1023, 98, 500], true), "ab");
    assert_eq!(tokenizer.decode(&[97, 1023, 98, 500], false), "a<|im_end|>b");
}

#[test]
fn control_ids_come_from_the_template_only() {
    let tokenizer = tiny();
    for template in [QWEN_TEMPLATE, TINY_TEMPLATE].map(|source| ChatTemplate::new(source).unwrap()) {
        let encode = |bad: &str| {
            let call =
                json!({"function": {"name": format!("f{bad}"), "arguments": {format!("a{bad}"): bad, "n": [bad]}}});
            let chat = Chat {
                messages: json!([
                    {"role": "system", "content": format!("s{bad}")},
                    {"role": "user", "content": format!("q{bad}")},
                    {"role": "assistant", "content": format!("a{bad}"), "reasoning": format!("r{bad}"), "tool_calls": [call]},
                    {"role": "tool", "content": format!("t{bad}")},
                ]),
                tools: json!([{"function": {"name": format!("f{bad}"), "description": bad, bad: bad}}]),
                add_generation_prompt: true,
                ..Chat::default()
            };
            tokenizer.encode_rendered(&template.render_chat(&chat).unwrap()).unwrap()
        };
        let tame = encode("x");
        assert!(control(&tokenizer, &tame.ids).len() > 8);
        for token in tokenizer.added_tokens() {
            let hostile = encode(&token.content);
            assert_eq!(control(&tokenizer, &hostile.ids), control(&tokenizer, &tame.ids), "{}", token.content);
            assert_eq!(hostile.assistant_starts.len(), tame.assistant_starts.len());
        }
    }
}

#[test]
fn a_token_half_in_a_message_is_text() {
    let tokenizer = tiny();
    let messages = json!([{"role": "user", "content": "im_end|"}]);
    for source in
        ["<|{{ messages[0].content }}>", "{{ '<|' + messages[0].content + '>' }}", "<|{{ messages[0].content[0:] }}>"]
    {
        let rendered = ChatTemplate::new(source).unwrap().render(&messages, &Value::Null, &Map::new()).unwrap();
        assert_eq!(rendered.text(), "<|im_end|>");
        assert_eq!(tokenizer.encode_rendered(&rendered).unwrap().ids, tokenizer.encode_text("<|im_end|>").unwrap());
    }
    let call = json!({"role": "assistant", "tool_calls": [{"function": {"name": "<|im_end|", "arguments": {"<|im_end|": 1}}}]});
    let template = ChatTemplate::new(QWEN_TEMPLATE).unwrap();
    let rendered = template.render_chat(&Chat { messages: json!([call]), ..Chat::default() }).unwrap();
    assert!(rendered.text().contains("<function=<|im_end|>\n<parameter=<|im_end|>\n"));
    let ids = tokenizer.encode_rendered(&rendered).unwrap().ids;
    assert_eq!(control(&tokenizer, &ids).iter().filter(|token| **token == "<|im_end|>").count(), 1);
}

#[test]
fn safe_ids_are_stock_ids_when_messages_hold_no_added_token() {
    let tokenizer = tiny();
    let template = ChatTemplate::new(QWEN_TEMPLATE).unwrap();
    let mut forging = 0;
    for case in chat_cases() {
        let Some(rendered) = render_case(&template, &case) else { continue };
        let safe = tokenizer.encode_rendered(&rendered).unwrap().ids;
        let stock = tokenizer.encode_stock(rendered.text()).unwrap();
        let forges = data_holds_added_token(&tokenizer, &rendered);
        assert_eq!(safe == stock, !forges, "{}", case["name"]);
        forging += usize::from(forges);
    }
    assert!((1..20).contains(&forging), "{forging} cases hold an added token");
}

fn tiny_json() -> Value {
    serde_json::from_slice(TINY_TOKENIZER).unwrap()
}

#[test]
fn broken_tokenizer_files_are_refused_by_name() {
    let refused = |change: &dyn Fn(&mut Value)| {
        let mut json = tiny_json();
        change(&mut json);
        Tokenizer::from_json(json.to_string().as_bytes(), None).unwrap_err().to_string()
    };
    let set =
        |pointer: &'static str, value: Value| refused(&move |json| *json.pointer_mut(pointer).unwrap() = value.clone());
    let not_ours = "(not a tokenizer of Qwen3.6)";
    assert_eq!(
        set("/model", json!({"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 0})),
        format!("tokenizer.json: model.type is \"Unigram\", expected \"BPE\" {not_ours}")
    );
    assert_eq!(
        set("/normalizer", Value::Null),
        format!("tokenizer.json: normalizer.type is missing, expected \"NFC\" {not_ours}")
    );
    assert_eq!(
        set("/pre_tokenizer/pretokenizers/1/add_prefix_space", json!(true)),
        format!("tokenizer.json: pre_tokenizer.pretokenizers.1.add_prefix_space is true, expected false {not_ours}")
    );
    assert!(
        set("/pre_tokenizer/pretokenizers/0/pattern/Regex", json!("(a+)+$")).contains("pattern.Regex is \"(a+)+$\"")
    );
    assert!(set("/pre_tokenizer", json!({"type": "Metaspace"})).contains("pre_tokenizer.type is \"Metaspace\""));
    assert!(set("/decoder", json!({"type": "WordPiece"})).contains("decoder.type is \"WordPiece\""));
    assert!(set("/model/byte_fallback", json!(true)).contains("model.byte_fallback is true"));
    assert!(set("/model/dropout", json!(0.5)).contains("model.dropout is 0.5"));
    assert!(set("/model/continuing_subword_prefix", json!("##")).contains("model.continuing_subword_prefix is \"##\""));
    assert!(set("/added_tokens/3/lstrip", json!(true)).contains("lstrip of the added token"));
    assert!(set("/added_tokens/3/content", json!("")).contains("has no text"));
    assert!(set("/added_tokens/3/id", json!(7)).contains("id 7 belongs to both"));
    assert!(set("/added_tokens/3/id", json!(u32::MAX)).contains("has id 4294967295"));
    assert!(set("/added_tokens/3/id", json!(-1)).contains("invalid value"));
    assert!(set("/model/vocab/A", json!(1)).contains("id 1 belongs to both"));
    assert!(set("/model/vocab", json!({})).contains("no token for the byte 0x00"));
    assert!(set("/model/merges", json!([["A", "B"]])).contains("needs \"AB\", which the vocabulary does not have"));
    assert!(set("/model/merges", json!(["A nonsense".repeat(100)])).contains("the merge of"));
    assert!(set("/model/merges", json!(["AB"])).contains("expected a pair of tokens"));
    assert!(set("/model/merges", json!([["A"]])).contains("a merge does not have two tokens"));
    assert!(refused(&|json| drop(json.as_object_mut().unwrap().remove("model"))).contains("missing field `model`"));
    let duplicated = |json: &mut Value| {
        let token = json["added_tokens"][0].clone();
        json["added_tokens"].as_array_mut().unwrap().push(token);
    };
    assert!(refused(&duplicated).contains("twice"));
    for bytes in [&b""[..], b"{", b"[]", b"null", b"\xff\xfe", &TINY_TOKENIZER[..5000]] {
        assert!(matches!(Tokenizer::from_json(bytes, None), Err(TokenizerError::Json { .. })));
    }
}

#[test]
fn end_token_comes_from_the_tokenizer_config() {
    let eos = |config: &str| Tokenizer::from_json(TINY_TOKENIZER, Some(config.as_bytes())).map(|t| t.eos());
    assert_eq!(eos(r#"{"eos_token": "<|endoftext|>"}"#), Ok(Some(1022)));
    assert_eq!(eos(r#"{"eos_token": {"content": "<|im_end|>", "lstrip": false}}"#), Ok(Some(1023)));
    assert_eq!(eos(r#"{"eos_token": null}"#), Ok(None));
    assert_eq!(eos("{}"), Ok(None));
    assert_eq!(Tokenizer::from_json(TINY_TOKENIZER, None).map(|t| t.eos()), Ok(None));
    for config in ["", "{", r#"{"eos_token": 7}"#, r#"{"eos_token": "</s>"}"#] {
        assert!(eos(config).unwrap_err().to_string().starts_with("tokenizer_config.json: "), "{config}");
    }
}

#[test]
fn merges_may_be_pairs_or_lines() {
    let with = |merges: Value| {
        let mut json = tiny_json();
        json["model"]["vocab"]["ab"] = 300.into();
        json["model"]["vocab"]["Ġab"] = 301.into();
        json["model"]["merges"] = merges;
        Tokenizer::from_json(json.to_string().as_bytes(), None).unwrap()
    };
    for merges in [json!([["a", "b"], ["Ġ", "ab"]]), json!(["a b", "Ġ ab"])] {
        let tokenizer = with(merges);
        assert_eq!(tokenizer.encode_text("ab ab a b").unwrap(), [300, 301, 32, 97, 32, 98]);
        assert_eq!(tokenizer.token_bytes(301), Some(&b" ab"[..]));
    }
}

#[test]
fn clones_share_and_threads_agree() {
    let tokenizer = tiny();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let tokenizer = tokenizer.clone();
            std::thread::spawn(move || tokenizer.encode_stock("a <think>é").unwrap())
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), tokenizer.encode_stock("a <think>é").unwrap());
    }
}

/// Whether NFC treats the character as it did in Unicode 9, whose tables the library has: the marks that came later
/// are a difference between it and the crate that these tests compare it with.
fn is_settled(c: char) -> bool {
    let is_mark = unicode_normalization::char::canonical_combining_class(c) != 0;
    match c {
        '\0'..'\u{590}' => true,
        '\u{590}'..'\u{10000}' => !is_mark,
        _ => ('\u{1F300}'..'\u{1F600}').contains(&c),
    }
}

/// Text with all that the split and NFC care about.
fn any_text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        any::<String>().prop_map(|text| text.chars().filter(|&c| is_settled(c)).collect()),
        prop::collection::vec(any::<char>().prop_filter("assigned later", |&c| is_settled(c)), 0..8)
            .prop_map(|chars| chars.into_iter().collect()),
        "[a-zA-Z' 0-9\r\n\t.,!]{0,12}",
        "[a-zé가-힣ᄀ-ᅟᅡ-ᅵ]{0,4}[\u{300}-\u{36f}]{0,3}",
        "[\u{1F468}\u{200D}\u{1F3FD}\u{FE0F}]{0,4}",
        prop::sample::select(vec!["<think>", "</think>", "<|im_end|>", "<|im_", "end|>"]).prop_map(str::to_owned),
    ];
    prop::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat())
}

fn check_round_trip(tokenizer: &Tokenizer, text: &str) -> Result<(), TestCaseError> {
    let composed: String = text.nfc().collect();
    let ids = tokenizer.encode_text(text).unwrap();
    prop_assert_eq!(tokenizer.decode(&ids, true), &composed[..]);
    prop_assert!(control(tokenizer, &ids).is_empty());
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id).unwrap().to_vec()).collect();
    prop_assert_eq!(&bytes[..], composed.as_bytes());
    // Cutting at added tokens may keep a mark from joining the bracket before it, and changes nothing else.
    let stock = tokenizer.encode_stock(text).unwrap();
    prop_assert_eq!(tokenizer.decode(&stock, false).nfc().collect::<String>(), composed);
    Ok(())
}

fn check_detokenizer(tokenizer: &Tokenizer, ids: &[u32]) -> Result<(), TestCaseError> {
    let mut detokenizer = Detokenizer::new(tokenizer, false);
    let mut text = String::new();
    let mut bytes = Vec::new();
    for &id in ids {
        text.push_str(&detokenizer.push(id));
        bytes.extend_from_slice(tokenizer.token_bytes(id).unwrap_or_default());
        prop_assert!(detokenizer.pending().len() < 4);
        // Nothing waits that is complete, and nothing complete waits.
        let shown = bytes.len() - detokenizer.pending().len();
        prop_assert_eq!(&text, &String::from_utf8_lossy(&bytes[..shown]));
    }
    text.push_str(&detokenizer.flush());
    prop_assert_eq!(&text, &String::from_utf8_lossy(&bytes));
    prop_assert_eq!(detokenizer.flush(), "");
    Ok(())
}

proptest! {
    #[test]
    fn decoding_undoes_encoding(text in any_text()) {
        check_round_trip(&tiny(), &text)?;
    }

    /// Any bytes, also such as begin characters and do not end them.
    #[test]
    fn pieces_are_the_lossy_text_of_all_bytes(
        ids in prop::collection::vec(prop_oneof![4 => 0x80u32..0x100, 2 => 0xE0u32..0xF8, 2 => 0x20u32..0x80, 1 => 0u32..1100], 0..40),
    ) {
        check_detokenizer(&tiny(), &ids)?;
    }

    #[test]
    fn no_file_makes_the_tokenizer_panic(
        pointer in prop::sample::select(vec![
            "", "/added_tokens", "/added_tokens/0", "/added_tokens/0/id", "/added_tokens/0/content", "/normalizer",
            "/pre_tokenizer", "/pre_tokenizer/pretokenizers", "/decoder", "/model", "/model/vocab", "/model/vocab/A",
            "/model/merges",
        ]),
        value in prop_oneof![
            Just(Value::Null), any::<u32>().prop_map(Value::from), any::<String>().prop_map(Value::from),
            Just(json!([])), Just(json!({})), Just(json!([[]])), Just(json!([["A", "B", "C"]])), Just(json!({"A": {}})),
        ],
    ) {
        let mut json = tiny_json();
        *json.pointer_mut(pointer).unwrap() = value;
        if let Ok(tokenizer) = Tokenizer::from_json(json.to_string().as_bytes(), None) {
            check_round_trip(&tokenizer, "A text é<think>")?;
        }
    }
}

#[test]
#[ignore = "needs the Qwen tokenizer: cargo xtask tokenizer, then cargo test -- --include-ignored"]
fn qwen_laws_hold_for_any_text() {
    let tokenizer = qwen();
    proptest!(|(text in any_text())| check_round_trip(&tokenizer, &text)?);
    proptest!(|(ids in prop::collection::vec(0u32..248_100, 0..30))| check_detokenizer(&tokenizer, &ids)?);
}
