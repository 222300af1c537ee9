//! Reading a request's JSON field by field. Null is the same as absent; what is wrong is named by its path, with what was
//! found and what was expected.

use std::fmt::Display;

use serde_json::{Map, Value};

use crate::turn::TurnError;

type Result<T> = std::result::Result<T, TurnError>;

/// An object of the request.
#[derive(Clone)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Path of the object, empty for the body.
    path: String,
}

impl<'a> Fields<'a> {
    /// The body of a request.
    pub fn of_body(body: &'a Value) -> Result<Fields<'a>> {
        match body {
            Value::Object(map) => Ok(Fields { map, path: String::new() }),
            other => Err(TurnError::invalid("body", describe(other), "a JSON object")),
        }
    }

    /// An object at `path`.
    pub fn of(value: &'a Value, path: impl Into<String>) -> Result<Fields<'a>> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Fields { map, path }),
            other => Err(TurnError::invalid(path, describe(other), "an object")),
        }
    }

    /// The path of a field.
    pub fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// The object itself.
    pub fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    /// A field that is there and not null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// That the field holds what it may not.
    pub fn refuse<T>(&self, name: &str, expected: impl Display) -> Result<T> {
        Err(TurnError::invalid(self.path(name), describe(self.map.get(name).unwrap_or(&Value::Null)), expected))
    }

    /// Text.
    pub fn string(&self, name: &str) -> Result<Option<&'a str>> {
        self.typed(name, Value::as_str, "a string")
    }

    /// Text that has to be there.
    pub fn required_string(&self, name: &str) -> Result<&'a str> {
        self.string(name)?.map_or_else(|| self.refuse(name, "a string"), Ok)
    }

    /// True or false.
    pub fn boolean(&self, name: &str) -> Result<Option<bool>> {
        self.typed(name, Value::as_bool, "true or false")
    }

    /// A number.
    pub fn number(&self, name: &str) -> Result<Option<f32>> {
        self.typed(name, |value| value.as_f64().map(|x| x as f32), "a number")
    }

    /// A whole number; `5.0` is one.
    pub fn integer(&self, name: &str) -> Result<Option<i64>> {
        self.typed(name, whole, "a whole number")
    }

    /// A list.
    pub fn array(&self, name: &str) -> Result<Option<&'a Vec<Value>>> {
        self.typed(name, Value::as_array, "an array")
    }

    /// An object.
    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>> {
        self.get(name).map(|value| Fields::of(value, self.path(name))).transpose()
    }

    /// One of some words.
    pub fn word<T: Copy>(&self, name: &str, words: &[(&str, T)]) -> Result<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let known = words.iter().find(|(word, _)| value.as_str() == Some(*word));
        match known {
            Some((_, meaning)) => Ok(Some(*meaning)),
            None => self.refuse(name, one_of(words.iter().map(|(word, _)| *word))),
        }
    }

    fn typed<T>(&self, name: &str, read: impl Fn(&'a Value) -> Option<T>, expected: &str) -> Result<Option<T>> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => read(value).map_or_else(|| self.refuse(name, expected), |x| Ok(Some(x))),
        }
    }
}

/// A whole number; clients in some languages write `5.0`.
pub fn whole(value: &Value) -> Option<i64> {
    let of_float = |x: f64| (x.fract() == 0.0 && x.abs() < 9e15).then_some(x as i64);
    value.as_i64().or_else(|| value.as_f64().and_then(of_float))
}

/// `"a", "b" or "c"`.
pub fn one_of<'a>(words: impl Iterator<Item = &'a str>) -> String {
    let mut words: Vec<String> = words.map(|word| format!("{word:?}")).collect();
    match words.pop() {
        Some(last) if !words.is_empty() => format!("{} or {last}", words.join(", ")),
        last => last.unwrap_or_default(),
    }
}

/// A value as messages name it: short ones as they are.
pub fn describe(value: &Value) -> String {
    match value {
        Value::Null => "nothing".to_owned(),
        Value::Bool(b) => b.to_string(),
        Value::Number(n) => n.to_string(),
        Value::String(text) if text.chars().count() <= 40 => format!("{text:?}"),
        Value::String(_) => "a long string".to_owned(),
        Value::Array(list) if list.is_empty() => "an empty array".to_owned(),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_wrong_is_named_by_its_path() {
        let body = json!({"a": {"b": "x", "n": 1.5}, "list": {}});
        let fields = Fields::of_body(&body).unwrap();
        let a = fields.object("a").unwrap().unwrap();
        let message = |result: Result<Option<i64>>| result.unwrap_err().to_string();
        assert_eq!(message(a.integer("n")), "a.n: found 1.5, expected a whole number");
        assert_eq!(message(a.integer("b")), "a.b: found \"x\", expected a whole number");
        assert_eq!(fields.array("list").unwrap_err().to_string(), "list: found an object, expected an array");
        assert_eq!(
            a.word("b", &[("y", 1), ("z", 2), ("w", 3)]).unwrap_err().to_string(),
            "a.b: found \"x\", expected \"y\", \"z\" or \"w\""
        );
        assert_eq!(
            Fields::of_body(&json!([1])).err().unwrap().to_string(),
            "body: found an array, expected a JSON object"
        );
    }

    #[test]
    fn null_is_absent_and_whole_floats_are_whole() {
        let body = json!({"a": null, "b": 5.0, "c": -3});
        let fields = Fields::of_body(&body).unwrap();
        assert_eq!(fields.integer("a"), Ok(None));
        assert_eq!(fields.integer("b"), Ok(Some(5)));
        assert_eq!(fields.integer("c"), Ok(Some(-3)));
        assert_eq!(fields.integer("d"), Ok(None));
    }
}
