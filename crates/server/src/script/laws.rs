//! The script is held to the contract of backends, and says what its documentation says.

use std::collections::BTreeSet;

use lily_backend::conformance::Subject;
use lily_backend::conformance::laws::CONTEXT;
use lily_backend::{Backend, Caps, Error, Input, Row, RowOutput, SamplingParams, StateId, Step, Ticket, Want};
use lily_model::chat::{Chat, Rendered};
use serde_json::{Value, json};

use super::{Script, ScriptBackend};
use crate::testing::text_model;

fn caps() -> Caps {
    Caps { max_context: 2 * CONTEXT, ..ScriptBackend::caps(&text_model()) }
}

fn load(script: &str) -> ScriptBackend {
    ScriptBackend::new(Script::parse(script).unwrap(), text_model(), caps()).unwrap()
}

// All laws but those of sampling settings, which a script ignores, and of traces, for it has no stages.
mod contract {
    use super::*;

    const OUTPUT: &str = "{\"output\": \"Once upon a time there was a fox.\"}";

    fn subject() -> Subject<'static> {
        Subject { load: &|| Box::new(load(OUTPUT)), budget: 0.0, experts_per_token: 1 }
    }

    lily_backend::laws_without_arithmetic! { conformance_laws [] }
}

/// The ids of a conversation's prompt.
fn prompt(messages: Value, think: bool) -> Vec<u32> {
    let chat = Chat { messages, enable_thinking: Some(think), add_generation_prompt: true, ..Chat::default() };
    let text = text_model();
    text.prompt(&text.template.render_chat(&chat).unwrap()).unwrap().ids
}

fn question(text: &str, think: bool) -> Vec<u32> {
    prompt(json!([{"role": "user", "content": text}]), think)
}

fn greedy() -> SamplingParams {
    SamplingParams::greedy(text_model().tokenizer.vocab_size() as u32)
}

fn submit(backend: &mut ScriptBackend, state: StateId, input: Input, params: SamplingParams) -> Ticket {
    backend.submit(Step { rows: vec![Row { state, input, want: Want::Token(params) }], trace: false }).unwrap()
}

fn id_of(rows: &[RowOutput]) -> u32 {
    let [RowOutput::Token(token)] = rows else { panic!("{rows:?}") };
    token.id
}

/// The tokens that may follow a text.
type Mask<'a> = Option<&'a dyn Fn(&str) -> BTreeSet<u32>>;

/// The answer to a prompt up to its end, and the error at its end. `mask` is asked before each token.
fn answer(script: &str, prompt: &[u32], mask: Mask<'_>) -> (String, Option<Error>) {
    let text = text_model();
    let mut backend = load(script);
    let state = backend.new_state(2 * CONTEXT).unwrap();
    let mut ids = Vec::new();
    let mut input = Input::Tokens(prompt.to_vec());
    loop {
        let said = text.tokenizer.decode(&ids, false);
        let params = SamplingParams { masked: mask.is_some(), ..greedy() };
        let ticket = submit(&mut backend, state, input, params);
        if let Some(mask) = mask {
            let mut bits = vec![0u32; text.tokenizer.vocab_size().div_ceil(32)];
            mask(&said).iter().for_each(|id| bits[*id as usize / 32] |= 1 << (id % 32));
            backend.set_mask(ticket, 0, &bits).unwrap();
        }
        match backend.wait(ticket) {
            Ok(output) if text.stop_tokens.contains(&id_of(&output.rows)) => return (said, None),
            Ok(output) => ids.push(id_of(&output.rows)),
            Err(error) => return (said, Some(error)),
        }
        assert!(ids.len() < CONTEXT, "no end: {said}");
        input = Input::PreviousSample;
    }
}

fn say(script: &str, prompt: &[u32]) -> String {
    let (said, error) = answer(script, prompt, None);
    assert!(error.is_none(), "{error:?}");
    said
}

#[test]
fn an_answer_goes_on_from_where_the_prompt_leaves_off() {
    let whole = r#"{"output": "<think>\nA greeting.\n</think>\n\nHello, 🦊!"}"#;
    assert_eq!(say(whole, &question("Hi", true)), "A greeting.\n</think>\n\nHello, 🦊!");
    assert_eq!(say(whole, &question("Hi", false)), "Hello, 🦊!");
    let plain = r#"{"output": "Hello"}"#;
    assert_eq!(say(plain, &question("Hi", true)), "\n</think>\n\nHello");
    assert_eq!(say(plain, &question("Hi", false)), "Hello");
    let unclosed = r#"{"output": "<think>\nI wonder"}"#;
    assert_eq!(say(unclosed, &question("Hi", true)), "I wonder");
    assert_eq!(say(r#"{"output": ""}"#, &question("Hi", false)), "");
    let call = r#"{"output": "why</think>\n\n<tool_call>\n<function=f>\n</function>\n</tool_call>"}"#;
    assert_eq!(say(call, &question("Hi", true)), "why</think>\n\n<tool_call>\n<function=f>\n</function>\n</tool_call>");
}

#[test]
fn lines_are_the_turns_of_a_conversation_or_answers_to_a_text() {
    let script = "{\"output\": \"one\"}\n{\"when\": \"weather\", \"output\": \"sunny\"}\n{\"output\": \"two\"}";
    assert_eq!(say(script, &question("Hi", false)), "one");
    assert_eq!(say(script, &question("the weather?", false)), "sunny");
    let turns = |roles: &[(&str, &str)]| {
        prompt(roles.iter().map(|(role, content)| json!({"role": role, "content": content})).collect(), false)
    };
    assert_eq!(say(script, &turns(&[("user", "weather"), ("assistant", "sunny"), ("user", "Hi")])), "two");
    let third = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")];
    assert_eq!(say(script, &turns(&third)), "one");
    let call = json!([{"type": "function", "function": {"name": "f", "arguments": "{}"}}]);
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": call},
        {"role": "tool", "content": "weather: rain"}]);
    assert_eq!(say(script, &prompt(messages, false)), "sunny");
}

#[test]
fn a_script_without_a_line_for_the_prompt_fails_and_says_why() {
    let (said, error) = answer(r#"{"when": "x", "output": "y"}"#, &question("Hi", false), None);
    assert_eq!(said, "");
    assert!(error.unwrap().to_string().contains("no line for this prompt"));
}

#[test]
fn an_error_comes_behind_the_output_and_the_state_is_lost() {
    let script = r#"{"output": "So far", "error": "unplugged"}"#;
    let (said, error) = answer(script, &question("Hi", false), None);
    assert_eq!(said, "So far");
    assert!(matches!(error, Some(Error::Device(message)) if message == "unplugged"));
    let mut backend = load(r#"{"error": "unplugged"}"#);
    let state = backend.new_state(CONTEXT).unwrap();
    let ticket = submit(&mut backend, state, Input::Tokens(question("Hi", false)), greedy());
    let ahead = submit(&mut backend, state, Input::PreviousSample, greedy());
    backend.wait(ticket).unwrap_err();
    backend.wait(ahead).unwrap_err();
    let row = Row { state, input: Input::Tokens(vec![1]), want: Want::Nothing };
    let refused = backend.submit(Step { rows: vec![row], trace: false });
    assert!(matches!(refused, Err(Error::StateLost(_))));
    backend.reset_state(state).unwrap();
    submit(&mut backend, state, Input::Tokens(vec![1]), greedy());
}

#[test]
fn a_prompt_without_turns_goes_on_with_the_text() {
    let text = text_model();
    let ids = |prompt: &str| text.prompt(&Rendered::by_hand(prompt)).unwrap().ids;
    let script = "{\"when\": \"x\", \"output\": \"y\"}\n{\"output\": \" a fox who sang.\"}";
    assert_eq!(say(script, &ids("Once there was")), " a fox who sang.");
    // A prompt that holds the beginning already is continued behind it.
    assert_eq!(say(script, &ids("Once there was a fox")), " who sang.");
}

#[test]
fn what_a_constraint_forbids_is_skipped_and_the_rest_is_said() {
    let text = text_model();
    let json = r#"{"a": [1, 2]}"#;
    let allowed = |said: &str| -> BTreeSet<u32> {
        // Tokens that go on with the JSON; the end where it is complete.
        let rest = json.strip_prefix(said).unwrap();
        let fits = |id: &u32| match text.tokenizer.token_bytes(*id) {
            Some(bytes) => !bytes.is_empty() && rest.as_bytes().starts_with(bytes),
            None => false,
        };
        if rest.is_empty() {
            return text.stop_tokens.clone();
        }
        (0..text.tokenizer.vocab_size() as u32).filter(fits).collect()
    };
    for output in ["Sure! {\"a\": [1, 2]} Anything else?", "{\"a\": [1, 2]}", "No."] {
        let script = json!({"output": output}).to_string();
        assert_eq!(answer(&script, &question("Hi", false), Some(&allowed)).0, json, "{output}");
    }
}

#[test]
fn a_bias_of_minus_100_forbids_a_token() {
    let text = text_model();
    let fox = text.tokenizer.encode_text(" fox").unwrap()[0];
    let mut backend = load(r#"{"output": "A fox sang."}"#);
    let state = backend.new_state(CONTEXT).unwrap();
    let params = SamplingParams { logit_bias: [(fox, -100.0)].into(), ..greedy() };
    let mut input = Input::Tokens(question("Hi", false));
    let mut said = Vec::new();
    loop {
        let ticket = submit(&mut backend, state, input, params.clone());
        let id = id_of(&backend.wait(ticket).unwrap().rows);
        if text.stop_tokens.contains(&id) {
            break;
        }
        said.push(id);
        input = Input::PreviousSample;
    }
    assert!(!said.contains(&fox));
    assert_eq!(text.tokenizer.decode(&said, false), "A sang.");
}
