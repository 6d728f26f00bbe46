//! What an application may rely on: one suite over the window, over moves, over loopback, and over
//! the TCP that a declined connection becomes. The last one keeps the suite honest: what it demands
//! is what the kernel's TCP does.
#![allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]

/// A test per name and fabric. A name is a function that takes a `&Bench` with two ports.
macro_rules! on_every_fabric {
    ($($name:ident)*) => {
        on_smc!($($name)*);
        on!(tcp_fallback Fallback $($name)*);
    };
}

/// As `on_every_fabric!`, without TCP: for what TCP does not have.
macro_rules! on_smc {
    ($($name:ident)*) => {
        on!(over_window Window $($name)*);
        on!(over_moves Move $($name)*);
        on!(over_loopback Loopback $($name)*);
    };
}

macro_rules! on {
    ($module:ident $fabric:ident $($name:ident)*) => {
        mod $module {
            $(
                #[test]
                fn $name() {
                    smc_tests::run(smc_tests::Fabric::$fabric, super::$name);
                }
            )*
        }
    };
}

mod close;
mod contact;
mod data;
mod eligibility;
mod many;
mod poll;
mod timing;
mod urgent;
