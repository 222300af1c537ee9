//! The kernels: each family's shader, with the wrapper that plans and encodes it beside it.
//!
//! Kernels of one token and kernels of many, `*_rows` and `gemm`, `route`, share what stands in `common`, `choice` and `heads`.
//! Products of many tokens come in two forms, see `tile`.
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
pub(crate) mod tile;

use std::fmt::Write;

use lily_backend::{Error, Result};
use lily_model::Shape;

use crate::device::{Bound, Gpu, KernelSpec, Language, Pipeline, Slice, Source};
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

/// A file of kernels as it is compiled: its name, its language, and what it is made of behind `common.metal`, with names.
struct File<'a> {
    name: &'static str,
    language: Language,
    parts: &'a [(&'static str, &'static str)],
}

/// Makes pipelines for one shape.
pub(crate) struct Builder<'a> {
    gpu: &'a mut dyn Gpu,
    prelude: String,
    /// Whether no pipeline is to be run: then a failed one does not stop the others.
    is_survey: bool,
    reports: Vec<KernelReport>,
    /// Whether products are made on tensor units; not asked yet before the first of them.
    tensor_units: Option<bool>,
}

/// What became of one pipeline, or of a way of doing things.
#[derive(Clone, Debug)]
pub struct KernelReport {
    /// The file and the kernel in it, with its function constants.
    pub name: String,
    /// Why the device does not take it, if it does not.
    pub error: Option<String>,
    /// What runs in its place then, if anything does.
    pub instead: Option<&'static str>,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(gpu: &'a mut dyn Gpu, shape: &Shape, kv: KvDtype) -> Builder<'a> {
        let prelude = prelude(shape, kv);
        Builder { gpu, prelude, is_survey: false, reports: Vec::new(), tensor_units: None }
    }

    /// One that only writes down what becomes of pipelines.
    pub(crate) fn survey(gpu: &'a mut dyn Gpu, shape: &Shape, kv: KvDtype) -> Builder<'a> {
        Builder { is_survey: true, ..Builder::new(gpu, shape, kv) }
    }

    /// What became of the pipelines.
    pub(crate) fn reports(self) -> Vec<KernelReport> {
        self.reports
    }

    /// A kernel of the file `name`.
    fn pipeline(&mut self, (name, text): (&'static str, &'static str), spec: KernelSpec<'_>) -> Result<Pipeline> {
        self.pipeline_of(&File { name, language: Language::Metal3_2, parts: &[(name, text)] }, spec)
    }

    /// The same of a file that is more than one text.
    fn pipeline_of(&mut self, file: &File<'_>, spec: KernelSpec<'_>) -> Result<Pipeline> {
        let made = self.compile(file, &spec);
        self.report(file, &spec, made.as_ref().err(), None);
        if self.is_survey { Ok(made.unwrap_or(Pipeline(u32::MAX))) } else { made }
    }

    fn compile(&mut self, file: &File<'_>, spec: &KernelSpec<'_>) -> Result<Pipeline> {
        let mut text = self.prelude.clone();
        for (name, part) in std::iter::once(&("common.metal", include_str!("common.metal"))).chain(file.parts) {
            // Writing to a String cannot fail.
            let _ = write!(text, "#line 1 \"{name}\"\n{part}");
        }
        self.gpu.pipeline(&Source { name: file.name, language: file.language, text }, spec)
    }

    fn report(&mut self, file: &File<'_>, spec: &KernelSpec<'_>, error: Option<&Error>, instead: Option<&'static str>) {
        let constants: Vec<String> = spec.constants.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let name = format!("{} {} {}", file.name, spec.kernel, constants.join(" ")).trim_end().to_owned();
        self.reports.push(KernelReport { name, error: error.map(ToString::to_string), instead });
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
