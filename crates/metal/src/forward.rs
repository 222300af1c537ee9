//! The forward pass of one token, as dispatches in the order of the data: [`Forward::token`] is the model, one function per
//! block below it, then the head. Formulas: NUMERICS.md. Barriers are the pass's own business.

use lily_backend::{Part, Stage};

use crate::device::{Pass, Slice};
use crate::kernels::delta::DeltaVectors;
use crate::kernels::gemv::ResidualArgs;
use crate::kernels::{Matrix, attention, delta, embed};
use crate::plan::{LayerPlan, MixerPlan, Plan};
use crate::state::State;
use crate::trace::{Marks, Normed, Views};

/// Encodes tokens of one session.
pub(crate) struct Forward<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) state: &'a State,
    pub(crate) pass: Pass,
    pub(crate) marks: Marks,
}

/// A token's own inputs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token {
    /// `[1]` u32.
    pub(crate) id: Slice,
    /// `[32]` pairs of cosine and sine of its position, f32.
    pub(crate) angles: Slice,
    pub(crate) position: usize,
}

impl<'a> Forward<'a> {
    pub(crate) fn new(plan: &'a Plan, state: &'a State, trace: bool) -> Forward<'a> {
        Forward { plan, state, pass: Pass::default(), marks: Marks::new(trace) }
    }

    /// One token through all layers; leaves the stream, gained for the head, in the scratch memory.
    pub(crate) fn token(&mut self, token: &Token) {
        let plan = self.plan;
        let stream = plan.scratch.stream;
        let args = embed::Args { token: token.id, embedding: &plan.embedding, gain: plan.norm_before(0), stream };
        plan.kernels.embed.encode(&mut self.pass, &args);
        self.marks.add(&self.pass, Stage::outside(Part::Embedding));
        let (mut attention, mut delta) = (0, 0);
        for (index, layer) in plan.layers.iter().enumerate() {
            self.marks.add(&self.pass, Stage::of(index, Part::MixerNorm));
            match &layer.mixer {
                MixerPlan::Delta { input, vectors, out } => {
                    self.delta(token.position, delta, input, vectors);
                    let args = ResidualArgs {
                        matrix: out,
                        x: plan.scratch.recalled,
                        gain: layer.moe_norm,
                        stream,
                        head_squares: Some(plan.scratch.head_squares),
                    };
                    plan.kernels.delta_out.encode(&mut self.pass, &args);
                    delta += 1;
                }
                MixerPlan::Attention { input, query_norm, key_norm, out } => {
                    self.attention(token, attention, input, [*query_norm, *key_norm]);
                    let args = ResidualArgs {
                        matrix: out,
                        x: plan.scratch.attended,
                        gain: layer.moe_norm,
                        stream,
                        head_squares: None,
                    };
                    plan.kernels.attention_out.encode(&mut self.pass, &args);
                    attention += 1;
                }
            }
            self.marks.add(&self.pass, Stage::of(index, Part::Mixer));
            self.marks.add(&self.pass, Stage::of(index, Part::MoeNorm));
            self.moe(index, layer);
        }
        self.marks.add(&self.pass, Stage::outside(Part::FinalNorm));
    }

    /// Grouped-query attention of the `index`-th attention layer, up to its output gate.
    fn attention(&mut self, token: &Token, index: usize, input: &Matrix, norms: [Slice; 2]) {
        let Plan { kernels, scratch: s, .. } = self.plan;
        kernels.attention_input.encode(&mut self.pass, input, &s.stream, [s.query_gate, s.key_value]);
        let [keys, values] = self.state.kv(index);
        let [query_norm, key_norm] = norms;
        let args = attention::Args {
            query_gate: s.query_gate,
            key_value: s.key_value,
            query_norm,
            key_norm,
            angles: token.angles,
            keys,
            values,
            outputs: s.outputs,
            maxima_sums: s.maxima_sums,
            out: s.attended,
            position: token.position,
            capacity: self.state.capacity(),
        };
        kernels.attention.encode(&mut self.pass, &args);
    }

    /// Gated DeltaNet of the `index`-th delta layer, up to its gated norm.
    fn delta(&mut self, position: usize, index: usize, input: &Matrix, vectors: &DeltaVectors) {
        let Plan { kernels, scratch: s, shape, .. } = self.plan;
        let (ring, state) = self.state.recurrent(index);
        let taps = lily_model::Shape::CONV_TAPS;
        // The newest input of the convolution takes the place of the oldest.
        let newest = ring.nth(position % taps, shape.conv_width() * 4);
        kernels.delta_input.encode(&mut self.pass, input, &s.stream, [newest, s.zba]);
        let args = delta::Args { ring, vectors, zba: s.zba, state, out: s.recalled, squares: s.head_squares, position };
        kernels.delta.encode(&mut self.pass, &args);
    }

    /// Router, the chosen experts and the shared expert.
    fn moe(&mut self, index: usize, layer: &LayerPlan) {
        let Plan { kernels, scratch: s, .. } = self.plan;
        kernels.moe.encode_router(&mut self.pass, &layer.experts, &s.stream, &s.routed);
        self.marks.add(&self.pass, Stage::of(index, Part::Router));
        kernels.moe.encode_gate_up(&mut self.pass, &layer.experts, &s.stream, &s.routed);
        let gain = self.plan.norm_before(index + 1);
        kernels.moe.encode_down(&mut self.pass, &layer.experts, &s.routed, gain, &s.stream);
        self.marks.add(&self.pass, Stage::of(index, Part::Moe));
        self.marks.add(&self.pass, Stage::of(index, Part::Layer));
    }

    /// The logits of the last token, `[vocab]` f32, and the best one below `limit` as a candidate for [`Forward::argmax`].
    pub(crate) fn head(&mut self, logits: Slice, limit: usize) {
        let Plan { kernels, scratch: s, head, .. } = self.plan;
        kernels.head.encode(&mut self.pass, head, &s.stream, logits, s.candidates, limit);
    }

    /// The id of the highest logit to `token`, `[1]` u32.
    pub(crate) fn argmax(&mut self, token: Slice) {
        let Plan { kernels, scratch, .. } = self.plan;
        kernels.head.encode_argmax(&mut self.pass, scratch.candidates, token);
    }

    /// Where the stages of a token are to be found.
    pub(crate) fn views(&self) -> Views {
        let s = &self.plan.scratch;
        Views {
            stream: s.stream.values,
            normed: Normed::Gained { gained: s.stream.gained, squares: s.stream.squares },
            router: s.routed.logits,
        }
    }
}
