//! The template engine: minijinja, set up so that templates written for Jinja2 and transformers mean the same.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};
use serde_json::Value as Json;

use super::ChatError;
use super::mark::{Marks, Taken, Traced};
use super::python;

/// The name under which the one template is known to the engine.
const NAME: &str = "chat_template";

/// Work allowed to a rendering, in the engine's unit: one instruction, or 64 bytes written. Qwen3.6's template takes
/// 25 units for each JSON value of its input and one for every eight bytes, so these leave a factor of eight and
/// more; the constant is for templates that are busy before the first message.
const FUEL: u64 = 20_000;
const FUEL_PER_VALUE: u64 = 200;
const FUEL_PER_BYTE: u64 = 1;

/// A unit of work can nest a list once more, and to drop a nested value the engine recurses: 170 bytes of stack a
/// level, measured. Only address space, until a template really does this.
const STACK_BYTES_PER_FUEL: u64 = 400;

/// What the template itself raised with `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// The variables of a rendering and their size.
pub(super) struct Input<'a> {
    pub(super) variables: Vec<(&'a str, &'a Json)>,
    /// Variables that count as the template's own text.
    pub(super) constants: &'a [(String, String)],
}

impl Input<'_> {
    /// Notes the private characters that `source` and the variables use.
    pub(super) fn taken(&self, source: &str) -> Taken {
        fn note(taken: &mut Taken, value: &Json) {
            match value {
                Json::String(text) => taken.note(text),
                Json::Array(items) => items.iter().for_each(|item| note(taken, item)),
                Json::Object(map) => map.iter().for_each(|(key, value)| {
                    taken.note(key);
                    note(taken, value);
                }),
                Json::Null | Json::Bool(_) | Json::Number(_) => {}
            }
        }
        let mut taken = Taken::default();
        taken.note(source);
        self.constants.iter().for_each(|(_, text)| taken.note(text));
        self.variables.iter().for_each(|(_, value)| note(&mut taken, value));
        taken
    }

    fn fuel(&self) -> u64 {
        fn size(value: &Json) -> u64 {
            FUEL_PER_VALUE
                + match value {
                    Json::String(text) => FUEL_PER_BYTE * text.len() as u64,
                    Json::Array(items) => items.iter().map(size).sum(),
                    Json::Object(map) => {
                        map.iter().map(|(key, value)| FUEL_PER_BYTE * key.len() as u64 + size(value)).sum()
                    }
                    Json::Null | Json::Bool(_) | Json::Number(_) => 0,
                }
        }
        FUEL + self.variables.iter().map(|(_, value)| size(value)).sum::<u64>()
    }
}

/// Checks that `source` is a template.
pub(super) fn compile(source: &str) -> Result<(), ChatError> {
    let marks = Taken::default().free_marks().ok_or(ChatError::Untraceable)?;
    environment(source, marks, false).map(drop).map_err(|error| ChatError::Syntax {
        line: error.line().unwrap_or(0),
        problem: error.detail().map_or_else(|| error.kind().to_string(), str::to_owned),
    })
}

/// Renders `source`, and its origin with it: see [`super`].
pub(super) fn render(source: &str, input: &Input<'_>, marks: Marks) -> Result<Traced, ChatError> {
    let fuel = input.fuel();
    // At least what a program's first thread has.
    let stack_bytes = fuel.saturating_mul(STACK_BYTES_PER_FUEL).max(8 << 20) as usize;
    let both = || {
        let text = render_once(source, input, marks, fuel, false)?;
        // Whatever fails here did not fail without marks.
        let marked = render_once(source, input, marks, fuel, true).map_err(|_| ChatError::Untraceable)?;
        marks.read(&marked).filter(|traced| traced.text == text).ok_or(ChatError::Untraceable)
    };
    let panicked = || ChatError::Render("the template engine panicked".to_owned());
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(NAME.to_owned()).stack_size(stack_bytes);
        let thread = thread.spawn_scoped(scope, both).map_err(|error| ChatError::Render(error.to_string()))?;
        thread.join().unwrap_or_else(|_| Err(panicked()))
    })
}

/// With `traced`, data stands between `marks`.
fn render_once(source: &str, input: &Input<'_>, marks: Marks, fuel: u64, traced: bool) -> Result<String, ChatError> {
    let convert = Convert { marks, traced };
    let constants = input.constants.iter().map(|(name, text)| (name.as_str(), Value::from(text)));
    let variables = input.variables.iter().map(|&(name, value)| (name, convert.variable(value)));
    let context = Value::from_pairs(constants.chain(variables));
    let mut environment = environment(source, marks, traced).map_err(chat_error)?;
    environment.set_fuel(Some(fuel));
    environment.get_template(NAME).and_then(|template| template.render(context)).map_err(chat_error)
}

fn chat_error(error: Error) -> ChatError {
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return ChatError::Raised(message.clone());
        }
        cause = inner.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => ChatError::TooMuchWork,
        _ => ChatError::Render(error.to_string()),
    }
}

/// JSON to the engine's values.
struct Convert {
    marks: Marks,
    traced: bool,
}

impl Convert {
    fn variable(&self, value: &Json) -> Value {
        match value {
            Json::String(text) => self.word(text),
            value => self.value(value),
        }
    }

    fn value(&self, value: &Json) -> Value {
        match value {
            Json::Null => Value::from(()),
            Json::Bool(b) => Value::from(*b),
            Json::Number(number) => number_value(number.as_str()),
            Json::String(text) => self.data(text),
            Json::Array(items) => items.iter().map(|item| self.value(item)).collect(),
            Json::Object(map) => {
                Value::from_pairs(map.iter().map(|(key, value)| (self.word(key), self.entry(key, value))))
            }
        }
    }

    fn entry(&self, key: &str, value: &Json) -> Value {
        match (key, value) {
            ("role" | "type", Json::String(text)) => self.word(text),
            _ => self.value(value),
        }
    }

    fn data(&self, text: &str) -> Value {
        if self.traced && !self.marks.is_placeholder(text) {
            Value::from(self.marks.wrap(text))
        } else {
            Value::from(text)
        }
    }

    /// Text that the template compares with its own words: the template's if it looks like one.
    fn word(&self, text: &str) -> Value {
        if text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b)) {
            Value::from(text)
        } else {
            self.data(text)
        }
    }
}

/// The number that Python's `json.loads` makes of `text`.
fn number_value(text: &str) -> Value {
    if text.contains(['.', 'e', 'E']) {
        // Out of range is infinite there too.
        return Value::from(text.parse().unwrap_or(f64::NAN));
    }
    match text.parse::<i128>() {
        Ok(number) => Value::from(number),
        Err(_) => Value::from_object(python::BigInt(text.to_owned())),
    }
}

fn environment(source: &str, marks: Marks, traced: bool) -> Result<Environment<'_>, Error> {
    let mut env = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    env.set_syntax(syntax.build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_formatter(|out, state, value| match python::str_of(value) {
        Some(text) => Ok(out.write_str(&text)?),
        None => minijinja::escape_formatter(out, state, value),
    });
    env.set_unknown_method_callback(move |state, value, method, args| {
        python::call_method(marks, state, value, method, args)
    });
    env.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let raised = Raised(message.to_string());
        Err(Error::new(ErrorKind::InvalidOperation, "raised by the template").with_source(raised))
    });
    env.add_filter("tojson", move |value: &Value, options: Kwargs| -> Result<Value, Error> {
        let indent: Option<usize> = options.get("indent")?;
        options.assert_all_used()?;
        let json = python::to_json(value, indent, marks)?;
        // All that this filter writes is data: names and punctuation too.
        Ok(Value::from(if traced { marks.wrap(&json) } else { json }))
    });
    env.add_filter("string", |state: &State<'_, '_>, value: &Value| match python::str_of(value) {
        Some(text) => Ok(Value::from(text)),
        None => minijinja::filters::string(state, value),
    });
    for name in ["length", "count"] {
        env.add_filter(name, move |value: &Value| match value.as_str() {
            Some(text) => Ok(Value::from(marks.strip(text).chars().count())),
            None => minijinja::filters::length(value).map(Value::from),
        });
    }
    env.add_filter("trim", move |state: &mut State<'_, '_>, value: &Value, chars: Rest<Value>| {
        python::call_method(marks, state, &python::text_of(value), "strip", &chars)
    });
    env.add_filter("replace", move |state: &mut State<'_, '_>, value: &Value, args: Rest<Value>| {
        python::call_method(marks, state, &python::text_of(value), "replace", &args)
    });
    env.add_template(NAME, source)?;
    Ok(env)
}
