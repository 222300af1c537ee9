//! Constraints made from grammars: JSON of a schema, calls of tools, and an end to thinking. The grammars are llguidance's.

use std::collections::VecDeque;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::constraint::Constraint;
use crate::reply::value_is_text;
use crate::text::TextModel;

/// White space between the parts of JSON. It is bounded, because a model that found nothing better to say would go on with
/// it; the deepest usual indentation is less.
const JSON_SPACE: &str = r"[ \n\t]{0,32}";

/// What the model writes to end its thinking. The template writes the same behind reasoning of earlier turns.
const THINK_END: &str = "\n</think>\n\n";
const THINK_CLOSE: &[u8] = b"</think>";

/// What may stand between a `</think>` of the model's own and the answer. It belongs to neither; where the prompt closed the block it
/// would be content.
const BEHIND_THINKING: &str = r"/\n{0,2}/";

/// Makes constraints for the tokens of one checkpoint. Building it looks at every token, which takes a good part of a second
/// at 248,000 of them.
pub struct Grammars {
    text: Arc<TextModel>,
    factory: ParserFactory,
    think_end: Vec<u32>,
    /// The mask that leaves every token but those that end the answer.
    not_the_end: Vec<u32>,
}

/// What the answer behind the think block has to be.
pub struct Grammar(Matcher);

impl Grammars {
    /// For the tokens of this checkpoint.
    ///
    /// # Errors
    /// In words, if its tokens cannot be used.
    pub fn new(text: Arc<TextModel>) -> Result<Grammars, String> {
        let tokenizer = &text.tokenizer;
        let count = u32::try_from(tokenizer.vocab_size()).map_err(|_| "more tokens than ids".to_owned())?;
        // Control tokens must not pass as their text.
        let words: Vec<Vec<u8>> = (0..count)
            .map(|id| {
                let bytes = tokenizer.token_bytes(id).unwrap_or_default();
                let marker = tokenizer.is_special(id).then_some(TokTrie::SPECIAL_TOKEN_MARKER);
                marker.into_iter().chain(bytes.iter().copied()).collect()
            })
            .collect();
        let stops: Vec<u32> = text.stop_tokens.iter().copied().filter(|id| *id < count).collect();
        let first = *stops.first().ok_or("the checkpoint has no stop token")?;
        let mut not_the_end = vec![u32::MAX; words.len().div_ceil(32)];
        for id in &stops {
            not_the_end[*id as usize / 32] &= !(1 << (id % 32));
        }
        let trie = TokTrie::from(&TokRxInfo::new(count, first), &words).with_eos_tokens(&stops);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let capabilities = InferenceCapabilities::default();
        let mut factory =
            ParserFactory::new(&env, capabilities, &SlicedBiasComputer::general_slices()).map_err(words_of)?;
        factory.quiet();
        let think_end = tokenizer.encode_stock(THINK_END).map_err(|e| e.to_string())?;
        Ok(Grammars { factory, think_end, not_the_end, text })
    }

    /// JSON of a schema. `in_thinking`, here and below: whether the prompt leaves its think block open.
    ///
    /// # Errors
    /// In words, if the schema is none or says what cannot be held to.
    pub fn json(&self, in_thinking: bool, schema: &Value) -> Result<Grammar, String> {
        self.build(in_thinking, &format!("answer\nanswer: {}\n", checked_json_rule(schema)?))
    }

    /// JSON of a schema, or else calls as by [`Grammars::calls`].
    ///
    /// # Errors
    /// As of the two.
    pub fn json_or_calls(
        &self,
        in_thinking: bool,
        schema: &Value,
        tools: &Value,
        several: bool,
    ) -> Result<Grammar, String> {
        let answer = checked_json_rule(schema)?;
        let calls = call_rules(tools, None, several)?;
        self.build(in_thinking, &format!("(answer | calls)\nanswer: {answer}\n{calls}"))
    }

    /// One or, if `several`, more calls of `tools` (a list in the format of OpenAI's API), or of the one named `only`.
    ///
    /// Parameters come in the order of the schema; those that it does not require may be left out.
    ///
    /// # Errors
    /// In words, if there is no such tool, or its schema says what cannot be held to.
    pub fn calls(
        &self,
        in_thinking: bool,
        tools: &Value,
        only: Option<&str>,
        several: bool,
    ) -> Result<Grammar, String> {
        self.build(in_thinking, &format!("calls\n{}", call_rules(tools, only, several)?))
    }

    /// `answer`: the rule of the answer, and all that it refers to.
    fn build(&self, in_thinking: bool, answer: &str) -> Result<Grammar, String> {
        let lark = format!("start: {} {answer}", if in_thinking { BEHIND_THINKING } else { "" });
        let parser = self.factory.create_parser(TopLevelGrammar::from_lark(lark));
        let matcher = Matcher::new(Ok(parser.map_err(|error| reason_of(&words_of(error)))?));
        match matcher.get_error() {
            Some(error) => Err(reason_of(&error)),
            None => Ok(Grammar(matcher)),
        }
    }

    /// The constraint of one answer: at most `max_thinking` tokens in the think block that the prompt left open (`in_thinking`), and
    /// behind it what `grammar` says: then the answer cannot end in the think block. `None` if nothing limits it.
    pub fn constraint(
        &self,
        in_thinking: bool,
        max_thinking: Option<usize>,
        grammar: Option<Grammar>,
    ) -> Option<Box<dyn Constraint>> {
        let max_thinking = max_thinking.filter(|_| in_thinking);
        if grammar.is_none() && max_thinking.is_none() {
            return None;
        }
        let place = match (in_thinking, max_thinking) {
            (false, _) => Place::Answer,
            (true, Some(0)) => Place::Closing(self.think_end.iter().copied().collect()),
            (true, left) => Place::Thinking { left, tail: Vec::new() },
        };
        let (think_end, not_the_end) = (self.think_end.clone(), self.not_the_end.clone());
        let grammar = grammar.map(|grammar| grammar.0);
        Some(Box::new(Guide { text: Arc::clone(&self.text), think_end, not_the_end, grammar, place }))
    }
}

fn words_of(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// What is wrong with a schema, without the grammar that it became a part of.
fn reason_of(error: &str) -> String {
    let line = error.lines().next().unwrap_or_default();
    line.split_once("JSON schema: ").map_or(line, |(_, reason)| reason).to_owned()
}

/// A schema as a Lark term.
fn json_rule(schema: &Value) -> String {
    let mut schema = if let Value::Object(_) = schema { schema.clone() } else { json!({"allOf": [schema]}) };
    schema["x-guidance"] = json!({"whitespace_pattern": JSON_SPACE});
    format!("%json {schema}")
}

fn checked_json_rule(schema: &Value) -> Result<String, String> {
    if schema.is_object() || schema.is_boolean() {
        Ok(json_rule(schema))
    } else {
        Err("a JSON schema is an object".into())
    }
}

/// The rule `calls` and all that it refers to.
fn call_rules(tools: &Value, only: Option<&str>, several: bool) -> Result<String, String> {
    let functions = tools.as_array().into_iter().flatten().map(|tool| tool.get("function").unwrap_or(tool));
    let named = functions.filter_map(|function| Some((function["name"].as_str()?, &function["parameters"])));
    let chosen: Vec<_> = named.filter(|(name, _)| only.is_none_or(|only| only == *name)).collect();
    if chosen.is_empty() {
        return Err(only.map_or("there are no tools to call".into(), |only| format!("there is no tool {only}")));
    }
    let more = if several { "(\"\\n\" call)*" } else { "" };
    let names: Vec<String> = (0..chosen.len()).map(|index| format!("function_{index}")).collect();
    let mut lark = format!(
        "calls: call {more}\n\
         call: \"<tool_call>\\n\" ({}) \"</function>\\n</tool_call>\"\n",
        names.join(" | ")
    );
    for (index, (name, parameters)) in chosen.into_iter().enumerate() {
        function_rules(&mut lark, index, name, parameters);
    }
    Ok(lark)
}

/// The rules of one function: `NAME>`, then its parameters, each on lines of its own.
fn function_rules(lark: &mut String, index: usize, name: &str, parameters: &Value) {
    let literal = |text: String| Value::String(text).to_string();
    let required: Vec<&str> =
        parameters["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut rule = format!("function_{index}: {}", literal(format!("<function={name}>\n")));
    let mut values = String::new();
    for (number, (key, schema)) in parameters["properties"].as_object().into_iter().flatten().enumerate() {
        let value = format!("value_{index}_{number}");
        let open = literal(format!("<parameter={key}>\n"));
        let optional = if required.contains(&key.as_str()) { "" } else { "?" };
        rule += &format!(" ({open} {value}){optional}");
        values += &value_rule(&value, schema, parameters);
    }
    lark.push_str(&rule);
    lark.push('\n');
    lark.push_str(&values);
}

/// The rule of a value with its closing tag: text as it stands, or JSON.
fn value_rule(name: &str, schema: &Value, parameters: &Value) -> String {
    const CLOSE: &str = "\"\\n</parameter>\\n\"";
    let texts = schema["enum"].as_array().filter(|values| !values.is_empty());
    match texts.and_then(|values| values.iter().map(Value::as_str).collect::<Option<Vec<_>>>()) {
        Some(values) => {
            let literals: Vec<String> = values.into_iter().map(|text| Value::String(text.into()).to_string()).collect();
            format!("{name}: ({}) {CLOSE}\n", literals.join(" | "))
        }
        None if value_is_text(schema, parameters) => format!("{name}[suffix={CLOSE}]: /(?s:.*)/\n"),
        None => {
            // What the schema refers to is beside the parameters.
            let mut whole = schema.clone();
            for definitions in ["$defs", "definitions"] {
                if let (Some(object), Some(value)) = (whole.as_object_mut(), parameters.get(definitions)) {
                    object.entry(definitions).or_insert_with(|| value.clone());
                }
            }
            format!("{name}: {} {CLOSE}\n", json_rule(&whole))
        }
    }
}

/// Leads one answer.
struct Guide {
    text: Arc<TextModel>,
    think_end: Vec<u32>,
    not_the_end: Vec<u32>,
    grammar: Option<Matcher>,
    place: Place,
}

enum Place {
    /// In the think block. `tail`: its last bytes, where the closing tag may be under way.
    Thinking { left: Option<usize>, tail: Vec<u8> },
    /// The think block is being closed with these tokens.
    Closing(VecDeque<u32>),
    /// Behind the think block.
    Answer,
}

impl Constraint for Guide {
    fn is_active(&self) -> bool {
        match &self.place {
            Place::Closing(_) => true,
            // An answer that ended in its think block would not be what was asked for.
            Place::Thinking { .. } | Place::Answer => self.grammar.is_some(),
        }
    }

    fn mask(&mut self) -> Result<Vec<u32>, String> {
        match (&self.place, &mut self.grammar) {
            (Place::Closing(ids), _) => {
                let id = ids.front().copied().unwrap_or_default();
                let mut mask = vec![0; id as usize / 32 + 1];
                mask[id as usize / 32] = 1 << (id % 32);
                Ok(mask)
            }
            (Place::Thinking { .. }, Some(_)) => Ok(self.not_the_end.clone()),
            (Place::Answer, Some(grammar)) => Ok(grammar.compute_mask_or_eos().map_err(words_of)?.as_slice().to_vec()),
            _ => Err("no mask is needed here".into()),
        }
    }

    fn advance(&mut self, token: u32) -> Result<(), String> {
        match &mut self.place {
            Place::Thinking { left, tail } => {
                tail.extend_from_slice(self.text.tokenizer.token_bytes(token).unwrap_or_default());
                if tail.windows(THINK_CLOSE.len()).any(|bytes| bytes == THINK_CLOSE) {
                    self.place = Place::Answer;
                    return Ok(());
                }
                let keep = tail.len().min(THINK_CLOSE.len() - 1);
                tail.drain(..tail.len() - keep);
                if let Some(left) = left {
                    *left -= 1;
                    if *left == 0 {
                        self.place = Place::Closing(self.think_end.iter().copied().collect());
                    }
                }
                Ok(())
            }
            Place::Closing(ids) => {
                ids.pop_front();
                if ids.is_empty() {
                    self.place = Place::Answer;
                }
                Ok(())
            }
            Place::Answer => match &mut self.grammar {
                Some(grammar) if !grammar.is_stopped() => grammar.consume_token(token).map_err(words_of),
                _ => Ok(()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReplyParser;
    use crate::testing::{STOP, text_model};

    fn grammars() -> Grammars {
        Grammars::new(text_model()).unwrap()
    }

    /// Whether a whole answer keeps to a constraint, byte by byte, and may end there.
    fn takes(constraint: &mut dyn Constraint, text: &str) -> bool {
        let allowed = |constraint: &mut dyn Constraint, id: u32| {
            !constraint.is_active()
                || constraint.mask().unwrap().get(id as usize / 32).is_some_and(|w| w >> (id % 32) & 1 == 1)
        };
        for byte in text.bytes() {
            if !allowed(constraint, byte.into()) {
                return false;
            }
            constraint.advance(byte.into()).unwrap();
        }
        allowed(constraint, STOP)
    }

    fn takes_json(schema: Value, text: &str) -> bool {
        let grammars = grammars();
        let grammar = grammars.json(false, &schema).unwrap();
        takes(&mut *grammars.constraint(false, None, Some(grammar)).unwrap(), text)
    }

    #[test]
    fn json_keeps_to_its_schema() {
        let schema = json!({
            "type": "object",
            "properties": {"name": {"type": "string"}, "child": {"$ref": "#/$defs/age"}},
            "required": ["name", "child"],
            "additionalProperties": false,
            "$defs": {"age": {"type": "integer"}},
        });
        assert!(takes_json(schema.clone(), r#"{"name": "Ivy \"é\"", "child": 3}"#));
        assert!(takes_json(schema.clone(), "{\n  \"name\": \"\",\n  \"child\": -1\n}"));
        for wrong in
            [r#"{"name": "Ivy"}"#, r#"{"name": 3, "child": 3}"#, r#"{"name": "x", "child": 3"#, "", "{}", "[1]"]
        {
            assert!(!takes_json(schema.clone(), wrong), "{wrong}");
        }
        assert!(takes_json(json!({"type": "object"}), r#"{"a": [1, null, {"b": true}]}"#));
        // The think block was closed by the prompt: white space would be content.
        assert!(!takes_json(json!({"type": "object"}), "\n\n{}") && !takes_json(json!({"type": "object"}), " {}"));
        assert!(!takes_json(json!({"type": "object"}), "[1]"));
        // Without end it could go on like this.
        assert!(!takes_json(json!({"type": "object"}), &format!("{{{}}}", "\n".repeat(100))));
        assert!(grammars().json(false, &json!("text")).is_err());
        assert_eq!(grammars().json(false, &json!({"type": "whatever"})).err().unwrap(), "Invalid type: whatever");
    }

    fn tools() -> Value {
        json!([
            {"type": "function", "function": {"name": "write", "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "mode": {"enum": ["new", "append"]},
                    "lines": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["path", "lines"],
            }}},
            {"type": "function", "function": {"name": "now"}},
        ])
    }

    #[test]
    fn forced_calls_are_calls_for_the_parser_with_arguments_of_the_schema() {
        let now = "<tool_call>\n<function=now>\n</function>\n</tool_call>";
        let write = |rest: &str| format!("<tool_call>\n<function=write>\n{rest}</function>\n</tool_call>");
        let path = "<parameter=path>\na <b>\n\"c\"\n</parameter>\n";
        let mode = "<parameter=mode>\nappend\n</parameter>\n";
        let lines = "<parameter=lines>\n[1, 2]\n</parameter>\n";
        let grammars = grammars();
        let takes = |only: Option<&str>, several, text: &str| {
            let grammar = grammars.calls(false, &tools(), only, several).unwrap();
            takes(&mut *grammars.constraint(false, None, Some(grammar)).unwrap(), text)
        };
        let whole = write(&[path, mode, lines].concat());
        assert!(takes(None, false, &whole) && takes(None, false, now) && takes(Some("now"), false, now));
        assert!(takes(None, true, &format!("{now}\n{whole}")));
        assert!(takes(None, false, &write(&[path, lines].concat())));
        let reply = ReplyParser::parse(false, &tools(), &whole);
        assert_eq!(reply.calls[0].arguments, r#"{"path":"a <b>\n\"c\"","mode":"append","lines":[1,2]}"#);
        for wrong in [
            "no call".to_owned(),
            write(lines),
            write(path),
            write(&[path, "<parameter=mode>\nold\n</parameter>\n", lines].concat()),
            write(&[path, "<parameter=lines>\n[1, \"2\"]\n</parameter>\n"].concat()),
            format!("{now}\n{now}"),
        ] {
            assert!(!takes(None, false, &wrong), "{wrong}");
        }
        assert!(!takes(Some("write"), false, now));
        let either = || grammars.json_or_calls(false, &json!({"type": "object"}), &tools(), true).unwrap();
        for (text, allowed) in [("{\"a\": 1}", true), (now, true), ("Neither.", false)] {
            assert_eq!(self::takes(&mut *grammars.constraint(false, None, Some(either())).unwrap(), text), allowed);
        }
        assert!(grammars.calls(false, &tools(), Some("read"), false).is_err());
        assert!(grammars.calls(false, &Value::Null, None, false).is_err());
    }

    #[test]
    fn a_call_without_arguments_closes_at_once() {
        let grammars = grammars();
        for parameters in [
            json!(null),
            json!({}),
            json!({"type": "object", "properties": {}}),
            json!({"type": "object", "properties": {}, "required": null}),
            json!({"type": "object", "properties": null, "required": [], "additionalProperties": false}),
        ] {
            let tools =
                json!([{"type": "function", "function": {"name": "now", "parameters": parameters, "strict": true}}]);
            let takes = |text: &str| {
                let grammar = grammars.calls(false, &tools, None, false).unwrap();
                takes(&mut *grammars.constraint(false, None, Some(grammar)).unwrap(), text)
            };
            assert!(takes("<tool_call>\n<function=now>\n</function>\n</tool_call>"), "{parameters}");
            for space in ["\n", "\t", " "] {
                assert!(
                    !takes(&format!("<tool_call>\n<function=now>\n{space}</function>\n</tool_call>")),
                    "{parameters}"
                );
            }
        }
    }

    #[test]
    fn the_grammar_begins_behind_the_think_block() {
        let grammars = grammars();
        let object = || Some(grammars.json(true, &json!({"type": "object"})).unwrap());
        let takes = |budget, text: &str| takes(&mut *grammars.constraint(true, budget, object()).unwrap(), text);
        assert!(takes(None, "Well { [.\n</think>\n\n{}"));
        assert!(takes(None, "</think>{}"));
        assert!(!takes(None, "Well.\n</think>\n\nNo."));
        assert!(!takes(None, "Well."));
        // At the end of the budget it has to close the block.
        assert!(takes(Some(4), "Well\n</think>\n\n{}"));
        assert!(!takes(Some(4), "Well, that is long\n</think>\n\n{}"));
        assert!(takes(Some(0), "\n</think>\n\n{}"));
        assert!(grammars.constraint(false, Some(4), None).is_none());
        let mut only_budget = grammars.constraint(true, Some(2), None).unwrap();
        assert!(self::takes(&mut *only_budget, "Hm\n</think>\n\nAnything."));
    }
}
