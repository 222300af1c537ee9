//! What each phase of decoding costs inside a chain of its own kind: the same kernel for one layer after the other, as overlapped
//! as in a step. Run by hand on a GPU: `cargo test --release -p lily-cuda phases -- --ignored --nocapture`.

use std::sync::Arc;
use std::time::Instant;

use lily_backend::{Backend, Input, Result, Row, Step, Want};
use lily_model::{Checkpoint, Shape};

use crate::kernels::{Pass, TILE_ROWS};
use crate::plan::{Layer, LayerMixer};
use crate::{CudaBackend, LoadOptions};

/// Layers that are enough for every chain to stream from memory and not from the cache.
const LAYERS: usize = 16;
const CONTEXT: usize = 256;

#[test]
#[ignore = "needs an NVIDIA GPU and 8 GB; prints what phases cost"]
fn phases_of_a_token() {
    let shape = Shape { layers: LAYERS, vocab: 32_000, ..Shape::QWEN36 };
    let source = lily_synth::in_memory("random weights", &shape, 1).unwrap();
    let checkpoint = Arc::new(Checkpoint::load(source).unwrap());
    let options = LoadOptions { max_context: Some(CONTEXT + 8), max_chunk: Some(CONTEXT), ..LoadOptions::default() };
    let mut backend = CudaBackend::load(checkpoint, &options).unwrap();
    let state = backend.new_state(CONTEXT + 8).unwrap();
    for ids in [vec![7; CONTEXT], vec![8]] {
        let rows = vec![Row { state, input: Input::Tokens(ids), want: Want::LastLogits }];
        let ticket = backend.submit(Step { rows, trace: false }).unwrap();
        backend.wait(ticket).unwrap();
    }
    let b = &backend;
    let (k, s, w) = (&b.kernels, &b.scratch, &b.weights);
    let deltas = k.sizes.projected_delta / TILE_ROWS;
    let attentions = k.sizes.projected_attention / TILE_ROWS;
    let partials = (s.part_sums, s.part_values);
    let chain = |name: &str, launch: &dyn Fn(&Pass<'_>, &Layer, usize) -> Result<bool>| {
        let pass = Pass { device: &b.device, overlap: b.device.overlaps() };
        let mut count = 0;
        let graph = b.device.capture(|| {
            for (index, layer) in w.layers.iter().enumerate() {
                count += usize::from(launch(&pass, layer, index)?);
            }
            Ok(())
        });
        let graph = graph.unwrap();
        let time = |runs: u32| {
            b.device.synchronize().unwrap();
            let started = Instant::now();
            (0..runs).for_each(|_| b.device.run(&graph).unwrap());
            b.device.synchronize().unwrap();
            started.elapsed().as_secs_f64() * 1e6 / f64::from(runs)
        };
        time(3);
        // The launch of a graph is in it, shared by its kernels.
        println!("{name:<28} {:6.2} us ({count} in a graph)", time(50) / count as f64);
    };
    chain("projections, delta", &|pass, layer, _| match &layer.mixer {
        LayerMixer::Delta { project, .. } => {
            k.norm_project(pass, (*project, deltas), s.h, layer.mixer_norm, s.projected).map(|()| true)
        }
        LayerMixer::Attention { .. } => Ok(false),
    });
    chain("projections, attention", &|pass, layer, _| match &layer.mixer {
        LayerMixer::Attention { project, .. } => {
            k.norm_project(pass, (*project, attentions), s.h, layer.mixer_norm, s.projected).map(|()| true)
        }
        LayerMixer::Delta { .. } => Ok(false),
    });
    chain("delta step", &|pass, layer, index| match &layer.mixer {
        LayerMixer::Delta { vectors, .. } => {
            k.delta_step(pass, (s.run, index - index / 4), s.projected, vectors, (s.mixed, s.squares)).map(|()| true)
        }
        LayerMixer::Attention { .. } => Ok(false),
    });
    chain("delta output", &|pass, layer, _| match &layer.mixer {
        LayerMixer::Delta { out, .. } => k.delta_output(pass, *out, s.mixed, s.squares, s.shared).map(|()| true),
        LayerMixer::Attention { .. } => Ok(false),
    });
    chain("attention", &|pass, layer, index| match &layer.mixer {
        LayerMixer::Attention { q_norm, k_norm, .. } => {
            k.attend(pass, (s.run, index / 4, 1), (s.projected, s.turns), (*q_norm, *k_norm), partials).map(|()| true)
        }
        LayerMixer::Delta { .. } => Ok(false),
    });
    chain("attention, parts", &|pass, layer, _| match &layer.mixer {
        LayerMixer::Attention { .. } => k.attend_combine(pass, s.run, s.projected, partials, s.mixed).map(|()| true),
        LayerMixer::Delta { .. } => Ok(false),
    });
    let (router, inner) = ((s.router, s.activation), (s.activation, s.shared));
    chain("router and shared", &|pass, layer, _| {
        k.route_and_share(pass, (layer.router, layer.shared_up), (s.h, layer.moe_norm), router).map(|()| true)
    });
    chain("experts up", &|pass, layer, _| {
        k.experts_up(pass, (layer.experts_up, layer.shared_down), s.router, (s.h, layer.moe_norm), inner).map(|()| true)
    });
    chain("experts down", &|pass, layer, _| {
        k.experts_down(pass, layer.experts_down, s.router, inner, s.mixed).map(|()| true)
    });
    chain("experts up and down", &|pass, layer, _| {
        k.experts_up(pass, (layer.experts_up, layer.shared_down), s.router, (s.h, layer.moe_norm), inner)?;
        k.experts_down(pass, layer.experts_down, s.router, inner, s.mixed).map(|()| true)
    });
    chain("router, experts", &|pass, layer, _| {
        k.route_and_share(pass, (layer.router, layer.shared_up), (s.h, layer.moe_norm), router)?;
        k.experts_up(pass, (layer.experts_up, layer.shared_down), s.router, (s.h, layer.moe_norm), inner)?;
        k.experts_down(pass, layer.experts_down, s.router, inner, s.mixed).map(|()| true)
    });
    chain("mixer, delta", &|pass, layer, index| match &layer.mixer {
        LayerMixer::Delta { project, vectors, out } => {
            k.norm_project(pass, (*project, deltas), s.h, layer.mixer_norm, s.projected)?;
            k.delta_step(pass, (s.run, index - index / 4), s.projected, vectors, (s.mixed, s.squares))?;
            k.delta_output(pass, *out, s.mixed, s.squares, s.shared).map(|()| true)
        }
        LayerMixer::Attention { .. } => Ok(false),
    });
    chain("mixer, attention", &|pass, layer, index| match &layer.mixer {
        LayerMixer::Attention { project, q_norm, k_norm, out } => {
            k.norm_project(pass, (*project, attentions), s.h, layer.mixer_norm, s.projected)?;
            k.attend(pass, (s.run, index / 4, 1), (s.projected, s.turns), (*q_norm, *k_norm), partials)?;
            k.attend_combine(pass, s.run, s.projected, partials, s.mixed)?;
            k.attention_output(pass, *out, s.mixed, s.shared).map(|()| true)
        }
        LayerMixer::Delta { .. } => Ok(false),
    });
}
