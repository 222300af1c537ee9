//! Fields that several APIs share: sampling, limits, stops, formats, the choice of tools.

use lily_engine::{MAX_LOGPROBS, Sampling};
use serde_json::{Map, Value, json};

use crate::fields::{Fields, describe, whole};
use crate::turn::{Format, ToolChoice, TurnError};

type Result<T> = std::result::Result<T, TurnError>;

/// The sampling fields that are there.
pub fn sampling(body: &Fields<'_>) -> Result<Sampling> {
    let repetition_penalty = match body.number("repetition_penalty")? {
        None => body.number("repeat_penalty")?,
        penalty => penalty,
    };
    // Clients of other engines write -1 for a random seed.
    let seed = body.integer("seed")?.filter(|seed| *seed != -1).map(|seed| seed as u64);
    let sampling = Sampling {
        temperature: body.number("temperature")?,
        top_k: body.integer("top_k")?,
        top_p: body.number("top_p")?,
        min_p: body.number("min_p")?,
        repetition_penalty,
        presence_penalty: body.number("presence_penalty")?,
        frequency_penalty: body.number("frequency_penalty")?,
        logit_bias: logit_bias(body)?,
        seed,
    };
    // Ids are checked against the model's vocabulary later.
    sampling.check(u32::MAX)?;
    Ok(sampling)
}

fn logit_bias(body: &Fields<'_>) -> Result<Option<Vec<(u32, f32)>>> {
    let Some(biases) = body.object("logit_bias")? else { return Ok(None) };
    let read = |(id, bias): (&String, &Value)| {
        let id_read = id.parse::<u32>();
        let Ok(id_read) = id_read else {
            return Err(TurnError::invalid("logit_bias", format!("{id:?}"), "ids of tokens, like {\"198\": -100}"));
        };
        match bias.as_f64() {
            Some(bias) => Ok((id_read, bias as f32)),
            None => biases.refuse(id, "a number from -100 to 100"),
        }
    };
    biases.map().iter().map(read).collect::<Result<_>>().map(Some)
}

/// Most tokens of the answer by any of these names; the smallest wins, -1 is no limit.
pub fn max_tokens(body: &Fields<'_>, names: &[&str]) -> Result<Option<usize>> {
    let mut least = None;
    for name in names {
        let Some(tokens) = body.integer(name)?.filter(|tokens| *tokens != -1) else { continue };
        match usize::try_from(tokens) {
            Ok(tokens) if tokens > 0 => least = Some(least.map_or(tokens, |least: usize| least.min(tokens))),
            _ => return body.refuse(name, "1 or more; leave it out for what the context has room for"),
        }
    }
    Ok(least)
}

/// Texts that end the answer: one, or a list of them.
pub fn stop(body: &Fields<'_>, name: &str) -> Result<Vec<String>> {
    const EXPECTED: &str = "a string or an array of strings, none of them empty";
    let texts = match body.get(name) {
        None => Vec::new(),
        Some(Value::String(text)) => vec![text.as_str()],
        Some(Value::Array(list)) => match list.iter().map(Value::as_str).collect() {
            Some(texts) => texts,
            None => return body.refuse(name, EXPECTED),
        },
        Some(_) => return body.refuse(name, EXPECTED),
    };
    if texts.contains(&"") {
        return Err(TurnError::invalid(body.path(name), "an empty string", EXPECTED));
    }
    Ok(texts.into_iter().map(str::to_owned).collect())
}

/// How many of the likeliest tokens to report: `count` is what the API calls `name`.
pub fn logprob_count(body: &Fields<'_>, name: &str) -> Result<Option<u32>> {
    let Some(count) = body.integer(name)? else { return Ok(None) };
    match u32::try_from(count) {
        Ok(count) if count <= MAX_LOGPROBS => Ok(Some(count)),
        _ => body.refuse(name, format!("0 to {MAX_LOGPROBS}")),
    }
}

/// Fields of other engines and of OpenAI that would change the answer and are not there, with the values that change
/// nothing. Anything else in them is refused: who sets them relies on them.
fn unsupported() -> [(&'static str, Value); 26] {
    [
        ("n", json!(1)),
        ("best_of", json!(1)),
        ("num_beams", json!(1)),
        ("use_beam_search", json!(false)),
        ("length_penalty", json!(1)),
        ("min_tokens", json!(0)),
        ("ignore_eos", json!(false)),
        ("typical_p", json!(1)),
        ("tfs_z", json!(1)),
        ("top_a", json!(0)),
        ("mirostat", json!(0)),
        ("mirostat_mode", json!(0)),
        ("dynatemp_range", json!(0)),
        ("dry_multiplier", json!(0)),
        ("xtc_probability", json!(0)),
        ("no_repeat_ngram_size", json!(0)),
        ("prompt_logprobs", json!(0)),
        ("grammar", json!("")),
        ("guided_grammar", json!("")),
        ("guided_regex", json!("")),
        ("guided_choice", json!([])),
        ("guided_json", json!("")),
        ("structured_outputs", json!({})),
        ("bad_words", json!([])),
        ("continue_final_message", json!(false)),
        ("suffix", json!("")),
    ]
}

/// Refuses what would change the answer and cannot be had here.
pub fn refuse_unsupported(body: &Fields<'_>) -> Result<()> {
    for (name, neutral) in unsupported() {
        let is_neutral = |value: &Value| match (value.as_f64(), neutral.as_f64()) {
            (Some(x), Some(y)) => x == y,
            _ => *value == neutral,
        };
        if body.get(name).is_some_and(|value| !is_neutral(value)) {
            let hint = match name {
                "n" | "best_of" => "1: this server gives one answer per request; send the request several times",
                "guided_json" | "structured_outputs" => "response_format with a json_schema instead",
                _ => return body.refuse(name, format!("{neutral} or nothing: this server does not have it")),
            };
            return body.refuse(name, hint);
        }
    }
    Ok(())
}

/// `{"type": "text" | "json_object" | "json_schema", ...}`. The schema stands in `json_schema.schema`, or, as the
/// Responses API has it, in `schema`.
pub fn format(parent: &Fields<'_>, name: &str) -> Result<Format> {
    #[derive(Clone, Copy)]
    enum Kind {
        Text,
        Object,
        Schema,
    }
    const KINDS: [(&str, Kind); 3] =
        [("text", Kind::Text), ("json_object", Kind::Object), ("json_schema", Kind::Schema)];
    let Some(format) = parent.object(name)? else { return Ok(Format::Text) };
    let nested = format.object("json_schema")?;
    let holder = nested.as_ref().unwrap_or(&format);
    let schema = match holder.get("schema") {
        None => None,
        Some(schema @ (Value::Object(_) | Value::Bool(_))) => Some(schema.clone()),
        Some(_) => return holder.refuse("schema", "a JSON schema: an object"),
    };
    match (format.word("type", &KINDS)?, schema) {
        (Some(Kind::Text), _) => Ok(Format::Text),
        (Some(Kind::Object), None) => Ok(Format::JsonObject),
        (Some(Kind::Object | Kind::Schema), Some(schema)) => Ok(Format::JsonSchema(schema)),
        (Some(Kind::Schema), None) => holder.refuse("schema", "a JSON schema: an object"),
        (None, _) => format.refuse("type", "\"text\", \"json_object\" or \"json_schema\""),
    }
}

/// The tools of a chat completion: functions, passed on as they are.
pub fn function_tools(body: &Fields<'_>) -> Result<Value> {
    let Some(tools) = body.array("tools")? else { return Ok(Value::Null) };
    for (index, tool) in tools.iter().enumerate() {
        let tool = Fields::of(tool, body.path(&format!("tools[{index}]")))?;
        if tool.string("type")?.is_some_and(|kind| kind != "function") {
            return tool.refuse("type", "\"function\": the server runs no tools by itself");
        }
        let Some(function) = tool.object("function")? else {
            return tool.refuse("function", "{\"name\": ..., \"description\": ..., \"parameters\": ...}");
        };
        if function.required_string("name")?.is_empty() {
            return function.refuse("name", "the name of a function");
        }
    }
    Ok(Value::Array(tools.clone()))
}

/// `tool_choice` as OpenAI's APIs spell it: a word, or a function by name.
pub fn tool_choice(body: &Fields<'_>, tools: &Value) -> Result<ToolChoice> {
    const EXPECTED: &str =
        "\"auto\", \"none\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": ...}}";
    let choice = match body.get("tool_choice") {
        None => return Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => ToolChoice::Auto,
            "none" => ToolChoice::None,
            "required" | "any" => ToolChoice::Required,
            _ => return body.refuse("tool_choice", EXPECTED),
        },
        Some(value @ Value::Object(_)) => {
            let name = value["function"]["name"].as_str().or_else(|| value["name"].as_str());
            match (value["type"].as_str(), name) {
                (Some("function") | None, Some(name)) => ToolChoice::Function(name.to_owned()),
                _ => return body.refuse("tool_choice", EXPECTED),
            }
        }
        Some(_) => return body.refuse("tool_choice", EXPECTED),
    };
    check_choice(&choice, tools)?;
    Ok(choice)
}

/// Whether the tools have what the choice wants. `tools` as [`Chat`](lily_model::chat::Chat) takes them.
pub fn check_choice(choice: &ToolChoice, tools: &Value) -> Result<()> {
    let names: Vec<&str> =
        tools.as_array().into_iter().flatten().filter_map(|tool| tool["function"]["name"].as_str()).collect();
    match choice {
        ToolChoice::Required if names.is_empty() => {
            Err(TurnError::invalid("tool_choice", "a call is required and no tool to call", "tools"))
        }
        ToolChoice::Function(name) if !names.contains(&name.as_str()) => {
            Err(TurnError::invalid("tool_choice", format!("{name:?}"), "the name of one of the tools"))
        }
        _ => Ok(()),
    }
}

/// What requests of one conversation have in common, if they say so.
pub fn affinity(body: &Fields<'_>) -> Result<Option<String>> {
    Ok(body.string("prompt_cache_key")?.map(str::to_owned))
}

/// A tool in the words of chat completions.
pub fn as_function(name: &str, description: Option<&Value>, parameters: Option<&Value>) -> Value {
    let mut function = Map::new();
    function.insert("name".to_owned(), name.into());
    for (key, value) in [("description", description), ("parameters", parameters)] {
        if let Some(value) = value {
            function.insert(key.to_owned(), value.clone());
        }
    }
    json!({"type": "function", "function": function})
}

/// Ids of tokens.
pub fn token_ids(value: &Value, path: &str) -> Result<Vec<u32>> {
    let id = |value: &Value| whole(value).and_then(|id| u32::try_from(id).ok());
    let list = value.as_array().ok_or_else(|| TurnError::invalid(path, describe(value), "an array of token ids"))?;
    let read = list.iter().enumerate();
    read.map(|(at, value)| {
        id(value).ok_or_else(|| TurnError::invalid(format!("{path}[{at}]"), describe(value), "the id of a token"))
    })
    .collect()
}
