//! Which checkpoint a command works on.

use std::path::Path;

use lily_model::{Checkpoint, Source};

use crate::{align, pull};

/// The files of the demo checkpoint, inside the binary.
macro_rules! embedded {
    ($($file:literal),+ $(,)?) => {
        &[$(($file, include_bytes!(concat!("../../../assets/demo/", $file)))),+]
    };
}

static DEMO: &[(&str, &[u8])] = embedded![
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
];

/// Opens the named directory, else the pulled model, aligned if it is there so, else the demo checkpoint inside the binary; the
/// last says so on stderr.
pub fn open(directory: Option<&Path>) -> anyhow::Result<Checkpoint> {
    if let Some(directory) = directory {
        return Ok(Checkpoint::open(directory)?);
    }
    if let Some(directory) = align::aligned_model().or_else(pull::pulled_model) {
        return Ok(Checkpoint::open(directory)?);
    }
    eprintln!("lily: this is the small demo model; `lily pull` brings the real one (20.4 GB)");
    demo()
}

/// What to call it: the name of its directory.
pub fn name(checkpoint: &Checkpoint) -> String {
    let directory = if let Source::Directory(path) = &checkpoint.source { path.canonicalize().ok() } else { None };
    let name = directory.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    name.unwrap_or_else(|| "lily-demo".into())
}

/// The demo checkpoint inside the binary.
pub fn demo() -> anyhow::Result<Checkpoint> {
    Ok(Checkpoint::load(Source::Embedded(DEMO))?)
}

#[cfg(test)]
mod tests {
    use lily_model::Shape;

    use super::*;

    #[test]
    fn the_embedded_checkpoint_has_the_shape_that_kernels_are_specialised_for() {
        let checkpoint = demo().unwrap();
        assert_eq!(checkpoint.config.shape, Shape::DEMO);
    }
}
