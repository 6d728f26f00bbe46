// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The handshake and the results of the demo as text.

use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, Table, presets};
use smc_core::wire::clc::{Message, SmcdV2};

use super::exchange::{PING, Summary};
use super::tap::{CapturedMessage, Direction};

/// The messages of a handshake, a paragraph each.
pub(super) fn handshake(messages: &[CapturedMessage]) -> String {
    let mut text = String::new();
    for captured in messages {
        let direction = match captured.direction {
            Direction::ToServer => "client -> server",
            Direction::ToClient => "server -> client",
        };
        let (name, lines) = match &captured.message {
            Some(message) => (message.kind().name(), words(message)),
            None => ("?", vec!["not understood".into()]),
        };
        let micros = captured.after.as_micros();
        let _ = writeln!(text, "   {micros:>5} us  {direction}  {name}, {} bytes", captured.len);
        for line in lines {
            let _ = writeln!(text, "             {line}");
        }
    }
    text
}

fn words(message: &Message) -> Vec<String> {
    match message {
        Message::Proposal(proposal) => {
            let Some(v2) = &proposal.v2 else { return vec!["SMC version 1".into()] };
            let eids: Vec<_> = v2.eids.iter().map(ToString::to_string).collect();
            let mut lines =
                vec![format!("I speak SMC {}. My EIDs: {}", v2.release, eids.join(", "))];
            for device in v2.smcd.devices().flatten() {
                lines.push(format!("I am GID {} on fabric {}", device.gid, device.chid));
            }
            lines
        }
        Message::AcceptD2(accept) => {
            let mut lines = vec![
                format!(
                    "Fabric {} and EID {} it is; I am GID {}",
                    accept.chid, accept.eid, accept.gid
                ),
                buffer(accept),
            ];
            if accept.first_contact.is_some() {
                lines.push("First contact: we make a link, which later connections use".into());
            }
            lines
        }
        Message::ConfirmD2(confirm) => vec![buffer(confirm)],
        Message::Decline(decline) => vec![format!("No: reason {}", decline.diagnosis)],
        _ => vec!["a message of another kind of SMC".into()],
    }
}

fn buffer(message: &SmcdV2) -> String {
    format!("Write to me in DMB {:#018x}, {} KiB", message.token.0, message.size.bytes() >> 10)
}

/// The comparison.
pub(super) fn table(bytes: u64, smc: &Summary, tcp: &Summary) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let header = ["SMC-D", "TCP", ""].map(|text| right(text.into()));
    table.set_header(std::iter::once(Cell::new("")).chain(header));
    let mut row = |name: &str, smc: String, tcp: String, ratio: f64| {
        let ratio = if ratio.is_finite() { format!("{ratio:.1} x") } else { "-".into() };
        table.add_row([Cell::new(name), right(smc), right(tcp), right(ratio)]);
    };
    let rate = |seconds: f64| {
        let gigabytes = bytes as f64 / seconds / 1e9;
        if gigabytes.is_finite() { format!("{gigabytes:.2} GB/s") } else { "-".into() }
    };
    row("to the server", rate(smc.to_server), rate(tcp.to_server), tcp.to_server / smc.to_server);
    row("back", rate(smc.to_client), rate(tcp.to_client), tcp.to_client / smc.to_client);
    let micros = |us: f64| format!("{us:.1} us");
    row(
        &format!("round trip, {PING} B"),
        micros(smc.round_trip),
        micros(tcp.round_trip),
        tcp.round_trip / smc.round_trip,
    );
    format!("{table}\n")
}
