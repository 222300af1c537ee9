//! The kernels: each family's shader, with the wrapper that plans and encodes it beside it.
//!
//! Kernels of one token and kernels of many, `*_rows` and `gemm`, `route`, share what stands in `common`, `choice` and `heads`.
//! A wrapper is made once, at load: it knows its pipeline and its grid. Encoding checks nothing.

pub(crate) mod attention;
pub(crate) mod attention_rows;
pub(crate) mod delta;
pub(crate) mod delta_rows;
pub(crate) mod embed;
pub(crate) mod gemm;
pub(crate) mod gemv;
pub(crate) mod moe;
pub(crate) mod route;
pub(crate) mod rows;
#[cfg(test)]
mod tests;

use std::fmt::Write;

use lily_backend::Result;
use lily_model::Shape;

use crate::device::{Bound, Gpu, KernelSpec, Pipeline, Slice, Source};
use crate::state::KvDtype;

/// Rows of the residual stream that one threadgroup finishes, as common.metal has it.
const STREAM_ROWS: usize = 8;
/// Simdgroups of a threadgroup that reads weights, as common.metal has it.
const SIMDS: usize = 4;
/// Threads of such a threadgroup.
const THREADS: usize = SIMDS * LANES;
/// Threads of a simdgroup, on every Apple GPU.
pub(crate) const LANES: usize = 32;
/// Columns that a simdgroup holds at a time, as common.metal has it.
const SLICE_COLUMNS: usize = 1024;

/// A quantized matrix in device memory, packed as in the checkpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) codes: Slice,
    pub(crate) scales: Slice,
    pub(crate) biases: Slice,
}

impl Matrix {
    fn bound(&self) -> [Bound; 3] {
        [Bound::Read(self.codes), Bound::Read(self.scales), Bound::Read(self.biases)]
    }
}

/// The residual stream of one token and what its next norm needs, see common.metal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    /// `[hidden]` f32.
    pub(crate) values: Slice,
    /// `[hidden]` f32: times the gain of the next norm.
    pub(crate) gained: Slice,
    /// `[stream_groups]` f32: sums of squares.
    pub(crate) squares: Slice,
}

impl Stream {
    fn written(&self) -> [Bound; 3] {
        [Bound::Write(self.values), Bound::Write(self.gained), Bound::Write(self.squares)]
    }

    /// What a kernel reads that takes the normed stream.
    fn normed(&self) -> [Bound; 2] {
        [Bound::Read(self.gained), Bound::Read(self.squares)]
    }
}

/// Threadgroups that finish the residual stream together.
pub(crate) fn stream_groups(shape: &Shape) -> usize {
    shape.hidden / STREAM_ROWS
}

/// Simdgroups that share the rows of a matrix with this many columns.
fn slices(inputs: usize) -> usize {
    inputs.div_ceil(SLICE_COLUMNS).next_power_of_two().min(SIMDS)
}

/// Makes pipelines for one shape.
pub(crate) struct Builder<'a> {
    gpu: &'a mut dyn Gpu,
    prelude: String,
    /// Where it is written down what becomes of each pipeline, if none is to be run: then a failed one does not stop the others.
    survey: Option<Vec<KernelReport>>,
}

/// What became of one pipeline.
#[derive(Clone, Debug)]
pub struct KernelReport {
    /// The file and the kernel in it, with its function constants.
    pub name: String,
    /// Why the device does not take it, if it does not.
    pub error: Option<String>,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(gpu: &'a mut dyn Gpu, shape: &Shape, kv: KvDtype) -> Builder<'a> {
        Builder { gpu, prelude: prelude(shape, kv), survey: None }
    }

    /// One that only writes down what becomes of pipelines.
    pub(crate) fn survey(gpu: &'a mut dyn Gpu, shape: &Shape, kv: KvDtype) -> Builder<'a> {
        Builder { survey: Some(Vec::new()), ..Builder::new(gpu, shape, kv) }
    }

    /// What became of the pipelines.
    pub(crate) fn reports(self) -> Vec<KernelReport> {
        self.survey.unwrap_or_default()
    }

    /// A kernel of the file `name`.
    fn pipeline(&mut self, (name, text): (&'static str, &str), spec: KernelSpec<'_>) -> Result<Pipeline> {
        let common = include_str!("common.metal");
        let Builder { gpu, prelude, survey } = self;
        let text = format!("{prelude}#line 1 \"common.metal\"\n{common}#line 1 \"{name}\"\n{text}");
        let made = gpu.pipeline(&Source { name, text }, &spec);
        let Some(reports) = survey else { return made };
        let constants: Vec<String> = spec.constants.iter().map(|(name, value)| format!("{name}={value}")).collect();
        reports.push(KernelReport {
            name: format!("{name} {} {}", spec.kernel, constants.join(" ")).trim_end().to_owned(),
            error: made.as_ref().err().map(ToString::to_string),
        });
        Ok(made.unwrap_or(Pipeline(u32::MAX)))
    }
}

/// The sizes of the shape as constants, for every file of kernels.
fn prelude(shape: &Shape, kv: KvDtype) -> String {
    let mut text = String::from("#include <metal_stdlib>\n");
    for (name, value) in [
        ("HIDDEN", shape.hidden),
        ("VOCAB", shape.vocab),
        ("QUERY_HEADS", shape.query_heads),
        ("KV_HEADS", shape.kv_heads),
        ("QUERIES_PER_KV", shape.queries_per_kv()),
        ("KV_WIDTH", shape.kv_width()),
        ("HEAD_DIM", Shape::HEAD_DIM),
        ("ROTARY_DIM", Shape::ROTARY_DIM),
        ("MOST_SPLITS", attention::MOST_SPLITS),
        ("DELTA_VALUE_HEADS", shape.delta_value_heads),
        ("VALUES_PER_KEY", shape.values_per_key()),
        ("DELTA_HEAD_DIM", Shape::DELTA_HEAD_DIM),
        ("DELTA_KEY_WIDTH", shape.delta_key_width()),
        ("DELTA_VALUE_WIDTH", shape.delta_value_width()),
        ("CONV_WIDTH", shape.conv_width()),
        ("CONV_TAPS", Shape::CONV_TAPS),
        ("EXPERTS", shape.experts),
        ("EXPERTS_PER_TOKEN", shape.experts_per_token),
        ("EXPERT_WIDTH", shape.expert_width),
        ("SHARED_WIDTH", shape.shared_width),
        ("GROUP", Shape::GROUP),
    ] {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "constant uint {name} = {value};");
    }
    let element = match kv {
        KvDtype::F32 => "float",
        KvDtype::Bf16 => "ushort",
    };
    let _ = writeln!(text, "typedef {element} KvElement;");
    let _ = writeln!(text, "constant float RMS_EPS = {:e}f;\nconstant float UNIT_EPS = 1e-6f;", shape.rms_eps);
    text
}
