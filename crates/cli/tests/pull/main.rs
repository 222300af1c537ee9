//! Laws of `lily pull`: the real binary against a local server that can misbehave.

#![allow(clippy::unwrap_used, reason = "a helper of a test fails the test by panicking")]

mod basic;
mod disk;
mod failures;
mod fixture;
mod network;
mod resume;
mod server;
