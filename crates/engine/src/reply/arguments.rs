//! The arguments of a call as JSON, written while their values stream.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// The functions that were offered.
#[derive(Clone, Debug, Default)]
pub(super) struct Tools {
    /// Schema of the parameters by name of the function.
    parameters: Map<String, Value>,
}

/// How the text of a value becomes JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Text,
    TextOrNull,
    Json,
}

/// Most references and alternatives around each other that are looked into. Tools nest two or three; a schema that
/// holds itself would nest without end.
const DEPTH: usize = 8;

const TYPES: [&str; 7] = ["string", "null", "integer", "number", "boolean", "array", "object"];

impl Tools {
    /// A list of tools in the format of OpenAI's API, or null. Of two with one name the first counts.
    pub(super) fn new(tools: &Value) -> Tools {
        let mut parameters = Map::new();
        for tool in tools.as_array().into_iter().flatten() {
            let function = tool.get("function").unwrap_or(tool);
            if let Some(name) = function["name"].as_str() {
                parameters.entry(name).or_insert_with(|| function["parameters"].clone());
            }
        }
        Tools { parameters }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    pub(super) fn offers(&self, function: &str) -> bool {
        self.parameters.contains_key(function)
    }

    fn form(&self, function: &str, key: &str) -> Form {
        let root = self.parameters.get(function).unwrap_or(&Value::Null);
        let schema = &root["properties"][key];
        match (value_is_text(schema, root), types(schema, root, 0).contains("null")) {
            (true, false) => Form::Text,
            (true, true) => Form::TextOrNull,
            (false, _) => Form::Json,
        }
    }
}

/// Whether the text of a value is the value: its `schema`, inside the schema `root` of all parameters, allows a string or says no
/// type.
pub(crate) fn value_is_text(schema: &Value, root: &Value) -> bool {
    let types = types(schema, root, 0);
    types.is_empty() || types.contains("string")
}

/// The types that a schema names: by the first of `$ref`, `type`, `const`, `enum`, the three combinations, `properties`
/// and `items` that says any.
fn types<'a>(schema: &'a Value, root: &'a Value, depth: usize) -> BTreeSet<&'a str> {
    if depth == DEPTH {
        return BTreeSet::new();
    }
    let reference = schema["$ref"].as_str().and_then(|path| root.pointer(path.strip_prefix('#')?));
    let named = match &schema["type"] {
        Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
        one => one.as_str().into_iter().collect::<BTreeSet<_>>(),
    };
    let members = |key: &str| schema[key].as_array().into_iter().flatten();
    let combined = ["anyOf", "oneOf", "allOf"].into_iter().flat_map(members);
    let from_members = [("properties", "object"), ("items", "array")];
    let mut found = [
        reference.map(|schema| types(schema, root, depth + 1)).unwrap_or_default(),
        named.into_iter().filter(|name| TYPES.contains(name)).collect(),
        schema.get("const").map(type_of).into_iter().collect(),
        members("enum").map(type_of).collect(),
        combined.flat_map(|schema| types(schema, root, depth + 1)).collect(),
        from_members.into_iter().filter(|(key, _)| schema.get(key).is_some()).map(|(_, name)| name).take(1).collect(),
    ]
    .into_iter()
    .find(|types| !types.is_empty())
    .unwrap_or_default();
    if schema["nullable"] == true && !found.is_empty() {
        found.insert("null");
    }
    found
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Writes the JSON of one call's arguments, piece by piece.
#[derive(Clone, Debug, Default)]
pub(super) struct Writer {
    begun: bool,
    value: Option<Unwritten>,
}

/// A value that is being written.
#[derive(Clone, Debug)]
struct Unwritten {
    form: Form,
    /// Its text as long as that may not become a string.
    text: String,
}

impl Writer {
    /// Begins the value of a parameter of `function`.
    pub(super) fn begin(&mut self, tools: &Tools, function: &str, key: &str) -> String {
        let form = tools.form(function, key);
        let open = if self.begun { ',' } else { '{' };
        let quote = if form == Form::Text { "\"" } else { "" };
        self.begun = true;
        self.value = Some(Unwritten { form, text: String::new() });
        format!("{open}{}:{quote}", string(key))
    }

    /// More text of the value.
    pub(super) fn push(&mut self, text: &str) -> String {
        let Some(value) = &mut self.value else { return String::new() };
        if value.form == Form::Text {
            return inside_string(text);
        }
        value.text.push_str(text);
        if value.form == Form::TextOrNull && !"null".starts_with(&value.text) {
            value.form = Form::Text;
            return format!("\"{}", inside_string(&value.text));
        }
        String::new()
    }

    /// The value is over.
    pub(super) fn end(&mut self) -> String {
        match self.value.take() {
            None => String::new(),
            Some(Unwritten { form: Form::Text, .. }) => "\"".to_owned(),
            Some(Unwritten { form: Form::TextOrNull, text }) if text != "null" => string(&text),
            Some(Unwritten { text, .. }) => json(&text),
        }
    }

    /// The call is over.
    pub(super) fn finish(self) -> &'static str {
        if self.begun { "}" } else { "{}" }
    }
}

/// The text of a value that is no string as JSON; what is none becomes a string all the same.
fn json(text: &str) -> String {
    match text.trim() {
        "True" => "true".to_owned(),
        "False" => "false".to_owned(),
        "None" => "null".to_owned(),
        trimmed => serde_json::from_str::<Value>(trimmed).map_or_else(|_| string(text), |value| value.to_string()),
    }
}

fn string(text: &str) -> String {
    Value::from(text).to_string()
}

/// What stands between the quotes. JSON escapes single characters, so pieces can be put together.
fn inside_string(text: &str) -> String {
    let quoted = string(text);
    quoted[1..quoted.len() - 1].to_owned()
}
