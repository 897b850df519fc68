//! What holds the house in order: the arrows between and inside crates, its texts, and its commands.
#![forbid(unsafe_code)]

mod arrows;
mod arrows_inside;
mod commands;
mod held;
mod peers;
mod reference;
mod tidy;
