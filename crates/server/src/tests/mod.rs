//! The APIs over turns that play given events.

mod anthropic;
mod chat;
mod completions;
mod http;
mod laws;
mod page;
mod responses;
mod users;
mod whole;
