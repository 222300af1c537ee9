//! One switch, spelled in many ways: whether the model thinks first, and how long.

use serde_json::{Map, Value};

use crate::fields::Fields;
use crate::turn::TurnError;

type Result<T> = std::result::Result<T, TurnError>;

/// What a request says about thinking.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Thinking {
    /// `None`: nothing.
    pub on: Option<bool>,
    /// Most tokens of it.
    pub max_tokens: Option<usize>,
    /// Whether thinking of earlier turns stays in the prompt.
    pub preserve: Option<bool>,
    /// Variables for the template.
    pub variables: Map<String, Value>,
}

/// Efforts by name. The model has one way of thinking; all but the first switch it on.
const EFFORTS: [(&str, bool); 8] = [
    ("none", false),
    ("minimal", true),
    ("low", true),
    ("medium", true),
    ("high", true),
    ("xhigh", true),
    ("max", true),
    ("default", true),
];

impl Thinking {
    /// Reads every spelling, and takes the switch from the first that is there: `chat_template_kwargs.enable_thinking`,
    /// `enable_thinking`, `think`, `thinking`, `reasoning`, `reasoning_effort`. So a setting that someone wrote by hand
    /// wins over what their client always sends. Of several budgets the smallest counts; one of 0 switches thinking off.
    ///
    /// # Errors
    /// A value that is none of the known ones, in any spelling.
    pub fn of(body: &Fields<'_>) -> Result<Thinking> {
        let kwargs = body.object("chat_template_kwargs")?;
        let kwarg = |name: &str| kwargs.as_ref().map_or(Ok(None), |kwargs| kwargs.boolean(name));
        let (thinking, thinking_budget) = thinking_object(body)?;
        let (reasoning, reasoning_budget) = reasoning_object(body)?;
        let effort = body.word("reasoning_effort", &EFFORTS)?;
        let spellings = [
            kwarg("enable_thinking")?,
            body.boolean("enable_thinking")?,
            switch_or_effort(body, "think")?,
            thinking,
            reasoning,
            effort,
        ];
        let budgets = [
            thinking_budget,
            reasoning_budget,
            budget(body, "thinking_budget")?,
            budget(body, "thinking_budget_tokens")?,
            budget(body, "reasoning_budget")?,
        ];
        let max_tokens = budgets.into_iter().flatten().min();
        let preserve = kwarg("preserve_thinking")?.or(body.boolean("preserve_thinking")?);
        let mut variables = kwargs.map(|kwargs| kwargs.map().clone()).unwrap_or_default();
        variables.retain(|name, _| !["enable_thinking", "preserve_thinking"].contains(&name.as_str()));
        if let (Some(effort), false) = (body.get("reasoning_effort"), variables.contains_key("reasoning_effort")) {
            variables.insert("reasoning_effort".to_owned(), effort.clone());
        }
        let on = spellings.into_iter().flatten().next();
        match max_tokens {
            Some(0) => Ok(Thinking { on: Some(false), max_tokens: None, preserve, variables }),
            _ => Ok(Thinking { on, max_tokens, preserve, variables }),
        }
    }
}

fn switch_or_effort(fields: &Fields<'_>, name: &str) -> Result<Option<bool>> {
    match fields.get(name) {
        Some(Value::Bool(on)) => Ok(Some(*on)),
        Some(Value::String(_)) => fields.word(name, &EFFORTS),
        Some(_) => fields.refuse(name, "true, false or an effort like \"high\""),
        None => Ok(None),
    }
}

/// A number of tokens; -1 is no limit.
fn budget(fields: &Fields<'_>, name: &str) -> Result<Option<usize>> {
    match fields.integer(name)? {
        None | Some(-1) => Ok(None),
        Some(tokens) => match usize::try_from(tokens) {
            Ok(tokens) => Ok(Some(tokens)),
            Err(_) => fields.refuse(name, "a number of tokens; -1 is no limit, 0 switches thinking off"),
        },
    }
}

/// `thinking: {"type": ..., "budget_tokens": ...}` or a switch.
fn thinking_object(body: &Fields<'_>) -> Result<(Option<bool>, Option<usize>)> {
    const TYPES: [(&str, Option<bool>); 4] =
        [("enabled", Some(true)), ("adaptive", Some(true)), ("disabled", Some(false)), ("auto", None)];
    if let Some(Value::Bool(on)) = body.get("thinking") {
        return Ok((Some(*on), None));
    }
    let Some(thinking) = body.object("thinking")? else { return Ok((None, None)) };
    let Some(on) = thinking.word("type", &TYPES)? else {
        return thinking.refuse("type", "\"enabled\", \"adaptive\" or \"disabled\"");
    };
    let budget = budget(&thinking, "budget_tokens")?;
    Ok(if on == Some(false) { (on, None) } else { (on, budget) })
}

/// `reasoning: {"effort": ..., "enabled": ..., "max_tokens": ...}`.
fn reasoning_object(body: &Fields<'_>) -> Result<(Option<bool>, Option<usize>)> {
    let Some(reasoning) = body.object("reasoning")? else { return Ok((None, None)) };
    let enabled = reasoning.boolean("enabled")?;
    let effort = reasoning.word("effort", &EFFORTS)?;
    Ok((enabled.or(effort), budget(&reasoning, "max_tokens")?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn thinking(body: Value) -> Result<Thinking> {
        Thinking::of(&Fields::of_body(&body).unwrap())
    }

    #[test]
    fn every_spelling_is_the_same_switch() {
        for (on, body) in [
            (true, json!({"chat_template_kwargs": {"enable_thinking": true}})),
            (false, json!({"chat_template_kwargs": {"enable_thinking": false}})),
            (true, json!({"enable_thinking": true})),
            (false, json!({"enable_thinking": false})),
            (true, json!({"think": true})),
            (true, json!({"think": "high"})),
            (false, json!({"think": false})),
            (false, json!({"reasoning_effort": "none"})),
            (true, json!({"reasoning_effort": "minimal"})),
            (true, json!({"reasoning_effort": "xhigh"})),
            (false, json!({"reasoning": {"effort": "none"}})),
            (true, json!({"reasoning": {"effort": "low", "summary": "auto"}})),
            (false, json!({"reasoning": {"enabled": false, "effort": "high"}})),
            (true, json!({"thinking": {"type": "enabled", "budget_tokens": 1024}})),
            (true, json!({"thinking": {"type": "adaptive"}})),
            (false, json!({"thinking": {"type": "disabled"}})),
            (false, json!({"thinking": false})),
            (false, json!({"reasoning_budget": 0})),
        ] {
            assert_eq!(thinking(body.clone()).unwrap().on, Some(on), "{body}");
        }
        for body in [json!({}), json!({"reasoning": {}}), json!({"reasoning": null}), json!({"enable_thinking": null})]
        {
            assert_eq!(thinking(body.clone()).unwrap(), Thinking::default(), "{body}");
        }
    }

    #[test]
    fn an_unknown_value_is_refused_by_name_even_where_another_spelling_wins() {
        for (field, body) in [
            ("chat_template_kwargs.enable_thinking", json!({"chat_template_kwargs": {"enable_thinking": "no"}})),
            ("chat_template_kwargs", json!({"chat_template_kwargs": "enable_thinking"})),
            ("enable_thinking", json!({"enable_thinking": 0})),
            ("think", json!({"think": "maybe"})),
            ("think", json!({"think": 1})),
            ("reasoning_effort", json!({"enable_thinking": true, "reasoning_effort": "extreme"})),
            ("reasoning", json!({"reasoning": "none"})),
            ("reasoning.effort", json!({"reasoning": {"effort": "off"}})),
            ("thinking.type", json!({"thinking": {"type": "on"}})),
            ("thinking.type", json!({"thinking": {"budget_tokens": 5}})),
            ("thinking.budget_tokens", json!({"thinking": {"type": "enabled", "budget_tokens": "many"}})),
            ("thinking_budget", json!({"thinking_budget": -2})),
        ] {
            let Err(TurnError::Invalid { field: Some(found), .. }) = thinking(body.clone()) else { panic!("{body}") };
            assert_eq!(found, field, "{body}");
        }
    }

    #[test]
    fn what_is_written_by_hand_wins_and_the_smallest_budget_counts() {
        let body = json!({"chat_template_kwargs": {"enable_thinking": false, "preserve_thinking": true, "x": 1},
            "reasoning_effort": "high"});
        let found = thinking(body).unwrap();
        assert_eq!((found.on, found.preserve), (Some(false), Some(true)));
        assert_eq!(Value::Object(found.variables), json!({"x": 1, "reasoning_effort": "high"}));
        let body =
            json!({"thinking": {"type": "enabled", "budget_tokens": 9}, "thinking_budget": 7, "reasoning_budget": -1});
        assert_eq!(thinking(body).unwrap().max_tokens, Some(7));
    }
}
