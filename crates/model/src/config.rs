//! `config.json` to [`Shape`], or the reason why it is another model.

use std::collections::{BTreeSet, HashMap};

use serde_json::{Map, Value};

use crate::error::ModelError;
use crate::quant::Bits;
use crate::shape::{LayerKind, Shape};
use crate::weights::is_unused;

/// What `config.json` says, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The sizes.
    pub shape: Shape,
    /// Width of the codes, tensor by tensor.
    pub quantization: Quantization,
    /// Every id under an `eos_token_id` key, top level and text part together.
    pub eos_token_ids: BTreeSet<u32>,
}

/// The quantization block: a default and the modules that differ from it.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantization {
    default: Bits,
    /// By module name without the prefix before `layers.`, see [`Quantization::canonical`].
    overrides: HashMap<String, Bits>,
}

impl Quantization {
    /// The width of a module's codes by its tensor name without `.weight`.
    pub fn bits(&self, module: &str) -> Bits {
        *self.overrides.get(Self::canonical(module)).unwrap_or(&self.default)
    }

    /// A module name without the wrapper that converters put before the text model, so that an override is found
    /// under whichever spelling the tensors have.
    fn canonical(module: &str) -> &str {
        let module = module.strip_prefix("model.language_model.").unwrap_or(module);
        let module = module.strip_prefix("language_model.").unwrap_or(module);
        module.strip_prefix("model.").unwrap_or(module)
    }
}

const MODEL_TYPES: &str = "qwen3_5_moe (Qwen3.6-35B-A3B)";
const USE_MLX: &str = "use mlx-community/Qwen3.6-35B-A3B-4bit (`lily pull`), or convert with mlx_lm.convert -q \
                       --q-bits 4 --q-group-size 64";

impl Config {
    /// Reads and checks a configuration; `file` is its name in messages.
    pub fn parse(file: &str, json: &[u8]) -> Result<Config, ModelError> {
        let damaged = |reason: String| ModelError::Damaged { file: file.into(), reason };
        let value: Value = serde_json::from_slice(json).map_err(|e| damaged(format!("not JSON: {e}")))?;
        let Value::Object(top) = &value else {
            return Err(damaged("not a JSON object".into()));
        };
        let text = match top.get("text_config") {
            Some(Value::Object(text)) => Section { prefix: "text_config.", map: text },
            Some(other) => return Err(differs("text_config", other, "an object")),
            None => Section { prefix: "", map: top },
        };
        let top = Section { prefix: "", map: top };
        check_model_type(&top, &text)?;
        let quantization = parse_quantization(&top)?;
        let shape = parse_shape(&text)?;
        let eos_token_ids = parse_eos(&[&top, &text])?;
        Ok(Config { shape, quantization, eos_token_ids })
    }
}

/// The ids under the `eos_token_id` key of a JSON file such as `generation_config.json`; empty if it has none.
pub fn eos_of(file: &str, json: &[u8]) -> Result<BTreeSet<u32>, ModelError> {
    let map: Map<String, Value> = serde_json::from_slice(json)
        .map_err(|e| ModelError::Damaged { file: file.into(), reason: format!("not a JSON object: {e}") })?;
    parse_eos(&[&Section { prefix: "", map: &map }])
}

/// An object of the configuration and where it stands, for messages.
struct Section<'a> {
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

impl Section<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn required(&self, key: &str, expected: &str) -> Result<&Value, ModelError> {
        self.get(key).ok_or_else(|| ModelError::OtherModel {
            field: format!("{}{key}", self.prefix),
            found: "absent".into(),
            expected: expected.into(),
        })
    }

    fn fail(&self, key: &str, found: &Value, expected: &str) -> ModelError {
        differs(&format!("{}{key}", self.prefix), found, expected)
    }

    /// A size between 1 and `most`.
    fn size(&self, key: &str, most: usize) -> Result<usize, ModelError> {
        let expected = format!("an integer from 1 to {most}");
        let value = self.required(key, &expected)?;
        match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n) if (1..=most).contains(&n) => Ok(n),
            _ => Err(self.fail(key, value, &expected)),
        }
    }

    /// A field that must have one value; absent counts as having it.
    fn fixed(&self, key: &str, expected: &Value) -> Result<(), ModelError> {
        match self.get(key) {
            Some(value) if !same(value, expected) => Err(self.fail(key, value, &expected.to_string())),
            _ => Ok(()),
        }
    }
}

/// Equality with numbers compared by value: `arbitrary_precision` keeps `1` and `1.0` apart.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

fn differs(field: &str, found: &Value, expected: &str) -> ModelError {
    let mut found = found.to_string();
    if found.chars().count() > 60 {
        found = found.chars().take(60).chain("...".chars()).collect();
    }
    ModelError::OtherModel { field: field.into(), found, expected: expected.into() }
}

fn check_model_type(top: &Section<'_>, text: &Section<'_>) -> Result<(), ModelError> {
    let value = top.required("model_type", MODEL_TYPES)?;
    let right = |value: &Value| matches!(value.as_str(), Some("qwen3_5_moe" | "qwen3_5_moe_text"));
    if !right(value) {
        return Err(top.fail("model_type", value, MODEL_TYPES));
    }
    if let Some(value) = text.get("model_type").filter(|value| !right(value)) {
        return Err(text.fail("model_type", value, MODEL_TYPES));
    }
    text.fixed("hidden_act", &"silu".into())?;
    text.fixed("attention_bias", &false.into())?;
    text.fixed("attn_output_gate", &true.into())?;
    // Absent in the published file; the weights are renormalised all the same.
    text.fixed("norm_topk_prob", &true.into())?;
    text.fixed("tie_word_embeddings", &false.into())?;
    top.fixed("tie_word_embeddings", &false.into())?;
    text.fixed("decoder_sparse_step", &1.into())?;
    text.fixed("mlp_only_layers", &Value::Array(Vec::new()))
}

fn parse_shape(text: &Section<'_>) -> Result<Shape, ModelError> {
    for (key, expected) in [
        ("head_dim", Shape::HEAD_DIM),
        ("linear_key_head_dim", Shape::DELTA_HEAD_DIM),
        ("linear_value_head_dim", Shape::DELTA_HEAD_DIM),
        ("linear_conv_kernel_dim", Shape::CONV_TAPS),
    ] {
        text.required(key, &expected.to_string())?;
        text.fixed(key, &expected.into())?;
    }
    let shape = Shape {
        hidden: multiple_of_group(text, "hidden_size", 1 << 16)?,
        layers: text.size("num_hidden_layers", 1 << 10)?,
        vocab: text.size("vocab_size", 1 << 24)?,
        query_heads: text.size("num_attention_heads", 1 << 10)?,
        kv_heads: text.size("num_key_value_heads", 1 << 10)?,
        delta_key_heads: text.size("linear_num_key_heads", 1 << 10)?,
        delta_value_heads: text.size("linear_num_value_heads", 1 << 10)?,
        experts: text.size("num_experts", 1 << 12)?,
        experts_per_token: text.size("num_experts_per_tok", 1 << 8)?,
        expert_width: multiple_of_group(text, "moe_intermediate_size", 1 << 16)?,
        shared_width: multiple_of_group(text, "shared_expert_intermediate_size", 1 << 16)?,
        max_context: text.size("max_position_embeddings", 1 << 24)?,
        rms_eps: parse_positive(text, "rms_norm_eps")? as f32,
        rope_theta: parse_rope(text)?,
    };
    divides(text, "num_key_value_heads", shape.kv_heads, "num_attention_heads", shape.query_heads)?;
    divides(text, "linear_num_key_heads", shape.delta_key_heads, "linear_num_value_heads", shape.delta_value_heads)?;
    if shape.experts_per_token > shape.experts {
        let expected = format!("at most num_experts = {}", shape.experts);
        return Err(text.fail("num_experts_per_tok", &shape.experts_per_token.into(), &expected));
    }
    check_layer_types(text, &shape)?;
    Ok(shape)
}

fn multiple_of_group(text: &Section<'_>, key: &str, most: usize) -> Result<usize, ModelError> {
    let n = text.size(key, most)?;
    if n.is_multiple_of(Shape::GROUP) {
        return Ok(n);
    }
    Err(text.fail(key, &n.into(), &format!("a multiple of the quantization group {}", Shape::GROUP)))
}

fn divides(text: &Section<'_>, key: &str, part: usize, of: &str, whole: usize) -> Result<(), ModelError> {
    if whole.is_multiple_of(part) {
        return Ok(());
    }
    Err(text.fail(key, &part.into(), &format!("a divisor of {of} = {whole}")))
}

/// A number that is positive and finite in f32 as well.
fn parse_positive(section: &Section<'_>, key: &str) -> Result<f64, ModelError> {
    let expected = "a positive number";
    let value = section.required(key, expected)?;
    let usable = |x: &f64| *x > 0.0 && (*x as f32).is_normal();
    value.as_f64().filter(usable).ok_or_else(|| section.fail(key, value, expected))
}

/// The base of the angles; the rotary parameters may stand in `rope_parameters` or beside it. For text the three
/// position ids of mRoPE are equal, so its sections do not matter.
fn parse_rope(text: &Section<'_>) -> Result<f64, ModelError> {
    let rotary = (Shape::ROTARY_DIM as f64 / Shape::HEAD_DIM as f64).into();
    let mut places = vec![text];
    let prefix;
    let nested;
    let key = if text.get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    match text.get(key) {
        Some(Value::Object(map)) => {
            prefix = format!("{}{key}.", text.prefix);
            nested = Section { prefix: &prefix, map };
            nested.fixed("rope_type", &"default".into())?;
            places.insert(0, &nested);
        }
        Some(other) => return Err(text.fail(key, other, "an object")),
        None => {}
    }
    for place in &places {
        place.fixed("partial_rotary_factor", &rotary)?;
    }
    let with = |key: &str| places.iter().copied().find(|place| place.get(key).is_some()).unwrap_or(text);
    with("partial_rotary_factor").required("partial_rotary_factor", &rotary.to_string())?;
    parse_positive(with("rope_theta"), "rope_theta")
}

fn check_layer_types(text: &Section<'_>, shape: &Shape) -> Result<(), ModelError> {
    text.fixed("full_attention_interval", &Shape::ATTENTION_INTERVAL.into())?;
    let Some(value) = text.get("layer_types") else {
        return Ok(());
    };
    let expected = "linear_attention but full_attention in every fourth layer, one entry per layer";
    let Value::Array(kinds) = value else {
        return Err(text.fail("layer_types", value, expected));
    };
    let right = |(layer, kind): (usize, &Value)| {
        let name = match shape.layer_kind(layer) {
            LayerKind::Delta => "linear_attention",
            LayerKind::Attention => "full_attention",
        };
        kind == name
    };
    if kinds.len() != shape.layers {
        return Err(text.fail("num_hidden_layers", &shape.layers.into(), &format!("the {} layer_types", kinds.len())));
    }
    if kinds.iter().enumerate().all(right) {
        return Ok(());
    }
    Err(text.fail("layer_types", value, expected))
}

fn parse_quantization(top: &Section<'_>) -> Result<Quantization, ModelError> {
    let Some(value) = top.get("quantization").or_else(|| top.get("quantization_config")) else {
        return Err(ModelError::Layout {
            found: "unquantized weights (no quantization in config.json)".into(),
            advice: USE_MLX,
        });
    };
    let Value::Object(map) = value else {
        return Err(differs("quantization", value, "an object"));
    };
    let section = Section { prefix: "quantization.", map };
    if let Some(method) = section.get("quant_method") {
        return Err(ModelError::Layout { found: format!("quantization method {method}"), advice: USE_MLX });
    }
    let default = parse_bits("quantization", map)?;
    let mut overrides = HashMap::new();
    for (module, value) in map.iter().filter(|(module, _)| !is_unused(module)) {
        match value {
            Value::Object(spec) => {
                let bits = parse_bits(&format!("quantization.{module}"), spec)?;
                overrides.insert(Quantization::canonical(module).to_owned(), bits);
            }
            // mlx-lm marks a module that it left in BF16 with `false`.
            Value::Bool(false) => {
                return Err(ModelError::Layout { found: format!("unquantized module {module}"), advice: USE_MLX });
            }
            _ => {}
        }
    }
    Ok(Quantization { default, overrides })
}

fn parse_bits(field: &str, spec: &Map<String, Value>) -> Result<Bits, ModelError> {
    if let Some(mode) = spec.get("mode").filter(|m| !m.is_null())
        && mode != "affine"
    {
        return Err(ModelError::Layout { found: format!("{field}.mode {mode}"), advice: USE_MLX });
    }
    let number = |key: &str| spec.get(key).and_then(Value::as_u64);
    if number("group_size") != Some(Shape::GROUP as u64) {
        let found = spec.get("group_size").unwrap_or(&Value::Null);
        return Err(differs(&format!("{field}.group_size"), found, &Shape::GROUP.to_string()));
    }
    match number("bits") {
        Some(4) => Ok(Bits::Four),
        Some(8) => Ok(Bits::Eight),
        _ => Err(differs(&format!("{field}.bits"), spec.get("bits").unwrap_or(&Value::Null), "4 or 8")),
    }
}

fn parse_eos(sections: &[&Section<'_>]) -> Result<BTreeSet<u32>, ModelError> {
    let mut ids = BTreeSet::new();
    for section in sections {
        let Some(value) = section.get("eos_token_id") else { continue };
        let list = match value {
            Value::Array(list) => list.as_slice(),
            one => std::slice::from_ref(one),
        };
        for id in list {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            ids.insert(id.ok_or_else(|| section.fail("eos_token_id", value, "a token id or a list of token ids"))?);
        }
    }
    Ok(ids)
}
