//! What a request says about sampling, checked and completed to the parameters that travel with a row.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::RangeInclusive;

use lily_backend::SamplingParams;
use serde_json::{Map, Value};

use crate::error::{EngineError, Result};

/// Sampling settings; `None` means not said. A request's settings are laid over the checkpoint's with
/// [`Sampling::or`]; what nobody said is off, and the temperature is 1.
///
/// Each field acts or is refused by [`Sampling::check`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampling {
    /// 0 to 2; 0 is greedy.
    pub temperature: Option<f32>,
    /// The most likely tokens that remain; 0 or -1 is off.
    pub top_k: Option<i64>,
    /// 0 to 1: probability of the most likely tokens that remain; 1 is off, 0 leaves one token.
    pub top_p: Option<f32>,
    /// 0 to 1: least probability of a token relative to the most likely one; 0 is off.
    pub min_p: Option<f32>,
    /// Above 0, at most 10: divides the positive logits of tokens that the answer has, multiplies negative ones; 1 is
    /// off.
    pub repetition_penalty: Option<f32>,
    /// -2 to 2: taken from the logits of tokens that the answer has; 0 is off.
    pub presence_penalty: Option<f32>,
    /// -2 to 2: taken from the logits of tokens that the answer has, once for each occurrence; 0 is off.
    pub frequency_penalty: Option<f32>,
    /// Added to the logits of these ids, each value from -100 to 100.
    pub logit_bias: Option<Vec<(u32, f32)>>,
    /// Seed of the draws; not said: a random one, reported with the end of the generation.
    pub seed: Option<u64>,
}

impl Sampling {
    /// What the generation_config.json of Qwen3.6-35B-A3B says, for checkpoints that come without this file. (The
    /// model was trained to be sampled; greedy decoding tends to loop.)
    pub fn published() -> Sampling {
        Sampling { temperature: Some(1.0), top_k: Some(20), top_p: Some(0.95), ..Sampling::default() }
    }

    /// Always the most likely token.
    pub fn greedy() -> Sampling {
        Sampling { temperature: Some(0.0), ..Sampling::default() }
    }

    /// These settings, and those of `defaults` where these say nothing.
    #[must_use]
    pub fn or(self, defaults: &Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.or(defaults.temperature),
            top_k: self.top_k.or(defaults.top_k),
            top_p: self.top_p.or(defaults.top_p),
            min_p: self.min_p.or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty.or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.or(defaults.frequency_penalty),
            logit_bias: self.logit_bias.or_else(|| defaults.logit_bias.clone()),
            seed: self.seed.or(defaults.seed),
        }
    }

    /// The sampling fields of a parsed generation_config.json. `do_sample: false` is greedy.
    ///
    /// # Errors
    /// [`EngineError::BadRequest`] with the field that is no number or out of range.
    pub fn from_generation_config(config: &Map<String, Value>) -> Result<Sampling> {
        let number = |field: &'static str| match config.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_f64() {
                Some(x) => Ok(Some(x as f32)),
                None => Err(EngineError::bad_request(field, value, "a number")),
            },
        };
        let greedy = match config.get("do_sample") {
            None | Some(Value::Null | Value::Bool(true)) => false,
            Some(Value::Bool(false)) => true,
            Some(value) => return Err(EngineError::bad_request("do_sample", value, "true or false")),
        };
        let top_k = match config.get("top_k") {
            None | Some(Value::Null) => None,
            Some(value) => Some(value.as_i64().ok_or_else(|| EngineError::bad_request("top_k", value, TOP_K))?),
        };
        let sampling = Sampling {
            temperature: if greedy { Some(0.0) } else { number("temperature")? },
            top_k,
            top_p: number("top_p")?,
            min_p: number("min_p")?,
            repetition_penalty: number("repetition_penalty")?,
            presence_penalty: number("presence_penalty")?,
            frequency_penalty: number("frequency_penalty")?,
            logit_bias: None,
            seed: None,
        };
        sampling.check(u32::MAX)?;
        Ok(sampling)
    }

    /// Whether every field is in its range; ids of `logit_bias` must lie below `vocab_limit`.
    ///
    /// # Errors
    /// [`EngineError::BadRequest`] with the first field that is not.
    pub fn check(&self, vocab_limit: u32) -> Result<()> {
        in_range("temperature", self.temperature, 0.0..=2.0)?;
        if let Some(k) = self.top_k
            && !(-1..=i64::from(u32::MAX)).contains(&k)
        {
            return Err(EngineError::bad_request("top_k", k, TOP_K));
        }
        in_range("top_p", self.top_p, 0.0..=1.0)?;
        in_range("min_p", self.min_p, 0.0..=1.0)?;
        if let Some(penalty) = self.repetition_penalty
            && !(penalty > 0.0 && penalty <= 10.0)
        {
            return Err(EngineError::bad_request("repetition_penalty", penalty, "above 0 and at most 10; 1 is off"));
        }
        in_range("presence_penalty", self.presence_penalty, -2.0..=2.0)?;
        in_range("frequency_penalty", self.frequency_penalty, -2.0..=2.0)?;
        for &(id, bias) in self.logit_bias.iter().flatten() {
            if id >= vocab_limit {
                return Err(EngineError::bad_request(
                    "logit_bias",
                    format!("token id {id}"),
                    format!("below {vocab_limit}"),
                ));
            }
            in_range("logit_bias", Some(bias), -100.0..=100.0)?;
        }
        Ok(())
    }

    /// The parameters of every row of one generation: settings checked, what was not said switched off, a seed drawn
    /// if there is none.
    pub(crate) fn params(&self, vocab_limit: u32, prompt_tokens: usize) -> Result<SamplingParams> {
        self.check(vocab_limit)?;
        Ok(SamplingParams {
            temperature: self.temperature.map_or(1.0, |t| if t < LEAST_TEMPERATURE { 0.0 } else { t }),
            // -1 and 0 are off; `check` has bounded the rest.
            top_k: self.top_k.and_then(|k| u32::try_from(k).ok()).unwrap_or(0),
            // The shortest prefix that reaches a sum above zero is one token.
            top_p: self.top_p.unwrap_or(1.0).max(f32::MIN_POSITIVE),
            min_p: self.min_p.unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            penalty_start: prompt_tokens,
            logit_bias: self.logit_bias.as_deref().unwrap_or_default().into(),
            seed: self.seed.unwrap_or_else(random_seed),
            ..SamplingParams::greedy(vocab_limit)
        })
    }
}

/// Below this a lead of 0.001 in the logits leaves the second token a chance of e^-10 and less, while logits divided by
/// it could leave the range of f32: such temperatures are greedy.
const LEAST_TEMPERATURE: f32 = 1e-4;

const TOP_K: &str = "a positive number of tokens; 0 or -1 is off";

fn in_range(field: &'static str, value: Option<f32>, range: RangeInclusive<f32>) -> Result<()> {
    match value {
        // NaN lies in no range.
        Some(x) if !range.contains(&x) => {
            Err(EngineError::bad_request(field, x, format!("{} to {}", range.start(), range.end())))
        }
        _ => Ok(()),
    }
}

/// A fresh seed from the randomness that the standard library gives its hash maps. Below 2^53, so that it survives
/// every JSON reader.
fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 11
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(json: &str) -> Result<Sampling> {
        Sampling::from_generation_config(&serde_json::from_str(json).unwrap())
    }

    #[test]
    fn the_published_generation_config_gives_the_published_settings() {
        let file = r#"{"bos_token_id": 248044, "do_sample": true, "eos_token_id": [248046, 248044],
            "pad_token_id": 248044, "temperature": 1.0, "top_k": 20, "top_p": 0.95}"#;
        assert_eq!(config(file).unwrap(), Sampling::published());
        assert_eq!(config("{}").unwrap(), Sampling::default());
        assert_eq!(config(r#"{"do_sample": false, "temperature": 0.7}"#).unwrap(), Sampling::greedy());
    }

    #[test]
    fn a_wrong_generation_config_names_the_field() {
        for (json, field) in [
            (r#"{"temperature": "hot"}"#, "temperature"),
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"top_k": 2.5}"#, "top_k"),
            (r#"{"do_sample": 1}"#, "do_sample"),
        ] {
            assert!(config(json).unwrap_err().to_string().starts_with(&format!("{field}: found ")), "{json}");
        }
    }

    #[test]
    fn values_out_of_range_are_refused_with_field_and_range() {
        let s = Sampling::default;
        for (bad, message) in [
            (Sampling { temperature: Some(2.5), ..s() }, "temperature: found 2.5, allowed 0 to 2"),
            (Sampling { temperature: Some(f32::NAN), ..s() }, "temperature: found NaN, allowed 0 to 2"),
            (
                Sampling { top_k: Some(-2), ..s() },
                "top_k: found -2, allowed a positive number of tokens; 0 or -1 is off",
            ),
            (Sampling { top_p: Some(1.01), ..s() }, "top_p: found 1.01, allowed 0 to 1"),
            (Sampling { min_p: Some(-0.1), ..s() }, "min_p: found -0.1, allowed 0 to 1"),
            (
                Sampling { repetition_penalty: Some(0.0), ..s() },
                "repetition_penalty: found 0, allowed above 0 and at most 10; 1 is off",
            ),
            (Sampling { presence_penalty: Some(-3.0), ..s() }, "presence_penalty: found -3, allowed -2 to 2"),
            (Sampling { frequency_penalty: Some(2.1), ..s() }, "frequency_penalty: found 2.1, allowed -2 to 2"),
            (
                Sampling { logit_bias: Some(vec![(100, 0.0)]), ..s() },
                "logit_bias: found token id 100, allowed below 100",
            ),
            (
                Sampling { logit_bias: Some(vec![(1, f32::INFINITY)]), ..s() },
                "logit_bias: found inf, allowed -100 to 100",
            ),
        ] {
            assert_eq!(bad.check(100).unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn what_is_off_reaches_the_backend_as_off() {
        let off = Sampling {
            temperature: Some(1.0),
            top_k: Some(-1),
            top_p: Some(1.0),
            min_p: Some(0.0),
            repetition_penalty: Some(1.0),
            presence_penalty: Some(0.0),
            frequency_penalty: Some(0.0),
            logit_bias: Some(Vec::new()),
            seed: Some(3),
        };
        let nothing_said = Sampling { seed: Some(3), ..Sampling::default() };
        let params = off.params(100, 7).unwrap();
        assert_eq!(params, nothing_said.params(100, 7).unwrap());
        assert_eq!(
            params,
            SamplingParams { temperature: 1.0, penalty_start: 7, seed: 3, ..SamplingParams::greedy(100) }
        );
        assert_eq!(Sampling { top_k: Some(0), ..off }.params(100, 7).unwrap(), params);
        let cold = |t| Sampling { temperature: Some(t), seed: Some(3), ..Sampling::default() }.params(100, 7).unwrap();
        assert_eq!(cold(1e-30), cold(0.0));
    }

    #[test]
    fn a_request_wins_over_defaults_field_by_field() {
        let request = Sampling { temperature: Some(0.0), seed: Some(1), ..Sampling::default() };
        let merged = request.or(&Sampling::published());
        assert_eq!((merged.temperature, merged.top_k, merged.seed), (Some(0.0), Some(20), Some(1)));
    }

    #[test]
    fn random_seeds_differ_and_fit_a_double() {
        let seeds: std::collections::BTreeSet<u64> = (0..100).map(|_| random_seed()).collect();
        assert_eq!(seeds.len(), 100);
        assert!(seeds.iter().all(|seed| *seed < 1 << 53));
    }
}
