//! Pictures as SVG: [`plot`], speeds against context; [`terminal`], what a terminal showed.
//!
//! Text stays text, and each picture has a background of its own in the colours of the reader's theme, so that it can be read on
//! any page.

pub mod plot;
pub mod terminal;

/// Text with the characters escaped that mean something in XML.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
