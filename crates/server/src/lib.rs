//! The HTTP side of lily: several APIs over one engine.
//!
//! A request of any API becomes a [`turn::TurnRequest`], in no API's words; what happens while it is answered comes back as
//! [`turn::TurnEvent`]s, which the API writes in its own form, streamed or whole. So rules about thinking, tools, formats and
//! stops stand in one place ([`turn`]), and a module of `api` knows only shapes of JSON.

#![warn(missing_docs)]

pub mod turn;
