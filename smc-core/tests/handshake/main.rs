//! The CLC handshake from outside: both roles against each other, captured Linux messages, damage.

mod damage;
mod declines;
mod golden;
mod pairs;
mod support;
