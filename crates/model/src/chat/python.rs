//! What chat templates expect of Python: `json.dumps`, `repr` of floats, and the methods of `str`.
//!
//! Everything that looks inside a string or cuts one works on marked strings too (see [`super::mark`]).

use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use super::mark::{Marks, Traced};

/// Nested deeper than this, a value is refused rather than followed down the stack.
const MAX_DEPTH: usize = 200;

/// A whole number beyond 128 bits, by its decimal digits.
#[derive(Debug)]
pub(super) struct BigInt(pub(super) String);

impl Object for BigInt {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

fn failed(detail: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}

/// The whitespace that `str.strip` and `str.split` know: Unicode's, and the four separators U+001C to U+001F.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `text.strip()`.
pub(super) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// `repr` of a float: the shortest digits that read back as the same number, as a decimal between 1e-4 and 1e16.
fn float_repr(x: f64) -> String {
    if x.is_nan() {
        return "nan".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{x:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs());
    }
    // Rust's plain form has the same digits, only without the ".0" of a whole number.
    let plain = format!("{x}");
    if plain.contains('.') { plain } else { plain + ".0" }
}

/// `str(value)` of what a template may print, apart from lists and mappings.
pub(super) fn str_of(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::None => Some("None".to_owned()),
        ValueKind::Bool => Some(if value.is_true() { "True" } else { "False" }.to_owned()),
        ValueKind::Number if !value.is_integer() => f64::try_from(value.clone()).ok().map(float_repr),
        _ => None,
    }
}

/// `str(value)` as Jinja's string filters take it: undefined is empty.
pub(super) fn text_of(value: &Value) -> Value {
    match value.kind() {
        ValueKind::String => value.clone(),
        _ => Value::from(str_of(value).unwrap_or_else(|| value.to_string())),
    }
}

/// `json.dumps(value, ensure_ascii=False, indent=indent)` of a value without marks in its strings, or with:
/// then they are left out.
pub(super) fn to_json(value: &Value, indent: Option<usize>, marks: Marks) -> Result<String, Error> {
    let mut json = Json { out: String::new(), indent, marks };
    json.value(value, 0)?;
    Ok(json.out)
}

struct Json {
    out: String,
    indent: Option<usize>,
    marks: Marks,
}

impl Json {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(failed("tojson: nested too deep"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => {
                let _ = write!(self.out, "{value}");
            }
            ValueKind::Number => {
                let x = f64::try_from(value.clone())?;
                match x {
                    _ if x.is_nan() => self.out.push_str("NaN"),
                    f64::INFINITY => self.out.push_str("Infinity"),
                    f64::NEG_INFINITY => self.out.push_str("-Infinity"),
                    _ => self.out.push_str(&float_repr(x)),
                }
            }
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
                self.items(&items, depth, ['[', ']'], |json, item| json.value(item, depth + 1))?;
            }
            ValueKind::Map => {
                let keys = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
                self.items(&keys, depth, ['{', '}'], |json, key| {
                    let name = match key.as_str() {
                        Some(name) => name.to_owned(),
                        None => to_json(key, None, json.marks)?,
                    };
                    json.string(&name);
                    json.out.push_str(": ");
                    json.value(&value.get_item(key)?, depth + 1)
                })?;
            }
            kind => match value.downcast_object_ref::<BigInt>() {
                Some(digits) => self.out.push_str(&digits.0),
                None => return Err(failed(format!("tojson: a value of kind {kind} is not JSON"))),
            },
        }
        Ok(())
    }

    fn items(
        &mut self,
        items: &[Value],
        depth: usize,
        [open, close]: [char; 2],
        mut write: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                self.out.push_str(if self.indent.is_some() { "," } else { ", " });
            }
            self.line(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in self.marks.strip(text).chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                '\0'..='\u{1f}' => {
                    let _ = write!(self.out, "\\u{:04x}", c as u32);
                }
                _ => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Reads the marks of `text`; what a template cut between marks can no longer be followed.
pub(super) fn read(marks: Marks, text: &str) -> Result<Traced, Error> {
    marks.read(text).ok_or_else(|| failed("the template cuts message text in a way that cannot be followed"))
}

/// `value.method(*args)` for the methods that templates call on strings, mappings and lists.
pub(super) fn call_method(
    marks: Marks,
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) => match string_method(marks, text, method, args)? {
            Some(result) => Ok(result),
            None => pycompat::unknown_method_callback(state, value, method, args),
        },
        None => pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// The methods of `str` that cut or compare. `None` for any other.
fn string_method(marks: Marks, marked: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let traced = || read(marks, marked);
    let plain = |text: &str| marks.strip(text);
    let value = match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            let traced = traced()?;
            let range = trim(&traced.text, chars.map(plain).as_deref(), method);
            Value::from(traced.slice(range, marks))
        }
        "split" | "rsplit" => {
            let (separator, limit): (Option<&str>, Option<i64>) = from_args(args)?;
            let separator = separator.map(plain);
            let limit = limit.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
            let traced = traced()?;
            let pieces = match separator.as_deref() {
                Some("") => return Err(failed("split: the separator is empty")),
                Some(separator) => split(&traced.text, separator, limit, method == "rsplit"),
                None => split_at_spaces(&traced.text, limit, method == "rsplit"),
            };
            pieces.into_iter().map(|piece| Value::from(traced.slice(piece, marks))).collect()
        }
        "startswith" | "endswith" => {
            let (affix,): (&Value,) = from_args(args)?;
            let text = plain(marked);
            let test = |affix: &Value| match affix.as_str().map(plain) {
                Some(affix) if method == "startswith" => Ok(text.starts_with(&affix)),
                Some(affix) => Ok(text.ends_with(&affix)),
                None => Err(failed(format!("{method}: expected a string or strings, found {}", affix.kind()))),
            };
            match affix.as_str() {
                Some(_) => Value::from(test(affix)?),
                None => {
                    let mut any = false;
                    for affix in affix.try_iter()?.checked() {
                        any |= test(&affix?)?;
                    }
                    Value::from(any)
                }
            }
        }
        "removeprefix" | "removesuffix" => {
            let (affix,): (&str,) = from_args(args)?;
            let (affix, traced) = (plain(affix), traced()?);
            let range = if method == "removeprefix" {
                traced.text.strip_prefix(&affix).map_or(0, |_| affix.len())..traced.text.len()
            } else {
                0..traced.text.strip_suffix(&affix).map_or(traced.text.len(), str::len)
            };
            Value::from(traced.slice(range, marks))
        }
        "replace" => {
            let (old, new, limit): (&str, &str, Option<i64>) = from_args(args)?;
            let (old, traced) = (plain(old), traced()?);
            if old.is_empty() {
                return Err(failed("replace: the text to replace is empty"));
            }
            let limit = limit.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
            let pieces = split(&traced.text, &old, limit, false);
            let pieces: Vec<_> = pieces.into_iter().map(|piece| traced.slice(piece, marks)).collect();
            Value::from(pieces.join(new))
        }
        "find" | "rfind" => {
            let (what,): (&str,) = from_args(args)?;
            let (what, text) = (plain(what), plain(marked));
            let at = if method == "find" { text.find(&what) } else { text.rfind(&what) };
            Value::from(at.map_or(-1, |at| text[..at].chars().count() as i64))
        }
        "count" => {
            let (what,): (&str,) = from_args(args)?;
            Value::from(plain(marked).matches(&plain(what)).count())
        }
        _ => return Ok(None),
    };
    Ok(Some(value))
}

/// What `strip`, `lstrip` or `rstrip` leaves of `text`.
fn trim(text: &str, chars: Option<&str>, side: &str) -> Range<usize> {
    let drop = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let end = if side == "lstrip" { text.len() } else { text.trim_end_matches(drop).len() };
    let start = if side == "rstrip" { 0 } else { end - text[..end].trim_start_matches(drop).len() };
    start..end
}

/// The pieces of `text` between at most `limit` separators, counted from the right if `from_right`.
fn split(text: &str, separator: &str, limit: usize, from_right: bool) -> Vec<Range<usize>> {
    let mut cuts: Vec<usize> = if from_right {
        text.rmatch_indices(separator).take(limit).map(|(at, _)| at).collect()
    } else {
        text.match_indices(separator).take(limit).map(|(at, _)| at).collect()
    };
    cuts.sort_unstable();
    let starts = std::iter::once(0).chain(cuts.iter().map(|at| at + separator.len()));
    let ends = cuts.iter().copied().chain(std::iter::once(text.len()));
    starts.zip(ends).map(|(start, end)| start..end).collect()
}

/// The words of `text`; after `limit` of them, the rest is one piece.
fn split_at_spaces(text: &str, limit: usize, from_right: bool) -> Vec<Range<usize>> {
    let mut pieces = Vec::new();
    let mut rest = trim(text, None, "strip");
    while !rest.is_empty() {
        let left = &text[rest.clone()];
        let space = if from_right { left.rfind(is_space) } else { left.find(is_space) };
        let Some(at) = space.filter(|_| pieces.len() < limit) else {
            pieces.push(rest);
            break;
        };
        if from_right {
            let word = left[at..].trim_start_matches(is_space).len();
            pieces.push(rest.end - word..rest.end);
            rest.end = rest.start + left[..at].trim_end_matches(is_space).len();
        } else {
            pieces.push(rest.start..rest.start + at);
            rest.start = rest.end - left[at..].trim_start_matches(is_space).len();
        }
    }
    if from_right {
        pieces.reverse();
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::mark::Taken;

    #[test]
    fn floats_print_as_in_python() {
        let expected = [
            (1e-7, "1e-07"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (5e-324, "5e-324"),
            (1e16, "1e+16"),
            (1234567890123456.0, "1234567890123456.0"),
            (9999999999999998.0, "9999999999999998.0"),
            (1.7976931348623157e308, "1.7976931348623157e+308"),
            (0.1 + 0.2, "0.30000000000000004"),
            (-0.0, "-0.0"),
            (2.0, "2.0"),
            (1.5e300, "1.5e+300"),
            (123456789.125, "123456789.125"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
        ];
        for (x, text) in expected {
            assert_eq!(float_repr(x), text);
        }
    }

    /// Expected values from CPython 3.
    #[test]
    fn strings_split_as_in_python() {
        let pieces =
            |text: &'static str, ranges: Vec<Range<usize>>| ranges.into_iter().map(|r| &text[r]).collect::<Vec<_>>();
        let all = usize::MAX;
        assert_eq!(pieces("a,b,,c", split("a,b,,c", ",", all, false)), ["a", "b", "", "c"]);
        assert_eq!(pieces("a,b,,c", split("a,b,,c", ",", 1, false)), ["a", "b,,c"]);
        assert_eq!(pieces("a,b,,c", split("a,b,,c", ",", 1, true)), ["a,b,", "c"]);
        assert_eq!(pieces("", split("", ",", all, false)), [""]);
        assert_eq!(pieces(" a  b\u{1c}c ", split_at_spaces(" a  b\u{1c}c ", all, false)), ["a", "b", "c"]);
        assert_eq!(pieces(" a  b c ", split_at_spaces(" a  b c ", 1, false)), ["a", "b c"]);
        assert_eq!(pieces(" a  b c ", split_at_spaces(" a  b c ", 1, true)), ["a  b", "c"]);
        assert!(split_at_spaces(" \n", all, false).is_empty());
    }

    /// Each method gives the same text with marks and without, and keeps the origin of each byte.
    #[test]
    fn methods_look_through_marks() {
        let marks = Taken::default().free_marks().unwrap();
        let data = marks.wrap("\n<a>x</a>y\n");
        let call = |method: &str, args: &[&str]| {
            let args: Vec<Value> = args.iter().map(|&a| Value::from(a)).collect();
            string_method(marks, &data, method, &args).unwrap().unwrap()
        };
        let w = |text: &str| Value::from(marks.wrap(text));
        assert_eq!(call("strip", &[]), w("<a>x</a>y"));
        assert_eq!(call("lstrip", &["\n"]), w("<a>x</a>y\n"));
        assert_eq!(call("split", &["</a>"]), Value::from(vec![w("\n<a>x"), w("y\n")]));
        assert_eq!(call("rsplit", &[]), Value::from(vec![w("<a>x</a>y")]));
        assert_eq!(call("startswith", &["\n<a>"]), Value::from(true));
        assert_eq!(call("endswith", &["y"]), Value::from(false));
        assert_eq!(call("removeprefix", &["\n<a>"]), w("x</a>y\n"));
        assert_eq!(call("removesuffix", &["y\n"]), w("\n<a>x</a>"));
        assert_eq!(
            call("replace", &["a", "b"]),
            Value::from(format!("{}b{}b{}", marks.wrap("\n<"), marks.wrap(">x</"), marks.wrap(">y\n")))
        );
        assert_eq!(call("find", &["x"]), Value::from(4));
        assert_eq!(call("rfind", &["q"]), Value::from(-1));
        assert_eq!(call("count", &["a"]), Value::from(2));
    }
}
