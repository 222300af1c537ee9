//! The named stages of a forward pass, for comparing two implementations layer by layer.

use std::fmt;

/// A point in the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Stage {
    /// The layer, or `None` before the first and after the last.
    pub layer: Option<usize>,
    /// Which value.
    pub part: Part,
}

/// The values that a trace records, all `[tokens, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// The embedded tokens, `hidden`.
    Embedding,
    /// After the norm before the mixer, `hidden`.
    MixerNorm,
    /// Output of the mixer, before the residual is added, `hidden`.
    Mixer,
    /// After the norm before the MoE, `hidden`.
    MoeNorm,
    /// Router logits, `experts`.
    Router,
    /// Output of the MoE, before the residual is added, `hidden`.
    Moe,
    /// The residual stream after the layer, `hidden`.
    Layer,
    /// After the final norm, `hidden`.
    FinalNorm,
}

impl Stage {
    /// A stage of layer `layer`.
    pub const fn of(layer: usize, part: Part) -> Stage {
        Stage { layer: Some(layer), part }
    }

    /// The embedding or the final norm.
    pub const fn outside(part: Part) -> Stage {
        Stage { layer: None, part }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = match self.part {
            Part::Embedding => "embedding",
            Part::MixerNorm => "mixer norm",
            Part::Mixer => "mixer",
            Part::MoeNorm => "moe norm",
            Part::Router => "router",
            Part::Moe => "moe",
            Part::Layer => "layer",
            Part::FinalNorm => "final norm",
        };
        match self.layer {
            Some(layer) => write!(f, "layer {layer} {part}"),
            None => f.write_str(part),
        }
    }
}

/// The value of one stage for one row of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StageOutput {
    /// Which value.
    pub stage: Stage,
    /// Row of the step.
    pub row: usize,
    /// `[tokens, width]`; the final norm is recorded only for tokens whose logits are computed.
    pub values: Vec<f32>,
}
