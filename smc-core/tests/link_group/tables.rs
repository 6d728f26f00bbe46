// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Every state with every event, printed and compared whole.

use std::fmt::Write;

use smc_core::link_group::*;
use smc_core::wire::clc::GidList;
use smc_core::wire::ids::*;
use smc_core::wire::llc::*;
use smc_core::wire::{List, WireError};

use super::support::*;

fn check(file: &str, table: &str) {
    let path = format!("{}/src/link_group/{file}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("UPDATE_TABLES").is_some() {
        std::fs::write(&path, table).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        stored == table,
        "{file} differs from the code; UPDATE_TABLES=1 cargo test writes it anew"
    );
}

const HEAD: &str = "Generated from `smc_core::link_group` by a test; edit the code, not this file.";

#[test]
fn table_of_links_is_up_to_date() {
    let mut out = format!("# States of a link\n\n{HEAD} `-`: the event means nothing there.\n\n|");
    for event in LinkEvent::ALL {
        let _ = write!(out, " | {event:?}");
    }
    out.push_str(" |\n|---|---|---|---|---|---|---|---|---|\n");
    for state in LinkState::ALL {
        let _ = write!(out, "| {state:?}");
        for event in LinkEvent::ALL {
            match state.next(event) {
                Some(next) => drop(write!(out, " | {next:?}")),
                None => out.push_str(" | -"),
            }
        }
        out.push_str(" |\n");
    }
    check("link_table.md", &out);
}

/// A group in a state of waiting.
struct Situation {
    host: usize,
    generation: Generation,
    pair: Pair,
}

/// Lets messages pass until the host waits for this.
fn until(mut pair: Pair, host: usize, activity: Activity) -> Situation {
    for _ in 0..100 {
        for this in [host, 1 - host] {
            pair.drain(this);
        }
        if pair.hosts[host].group.activity() == activity {
            let generation = pair.hosts[host].group.params().generation;
            pair.wires.clear();
            pair.forget();
            pair.honest = false;
            return Situation { host, generation, pair };
        }
        let Some(wire) = pair.wires.pop_front() else { break };
        pair.deliver(wire);
    }
    panic!("{activity:?} is not reached by {host}: {:?}", pair.names());
}

/// One link, with RNICs for a second one.
fn one_link(generation: Generation, host: usize) -> Pair {
    let mut pair = Pair::running(generation, [2, 2]);
    let second = pair.active(host)[1];
    pair.hosts[SERVER].broken.insert(RnicId(1));
    pair.hosts[SERVER].group.delete_link(
        pair.end_or(SERVER, host, second),
        DeleteReason::OPERATOR,
        pair.now,
    );
    pair.run_until_idle();
    pair.hosts[SERVER].broken.clear();
    pair
}

impl Pair {
    fn end_or(&self, wanted: usize, host: usize, link: LinkKey) -> LinkKey {
        match wanted == host {
            true => link,
            false => self.end_of(host, self.hosts[host].qpn(link).unwrap()).unwrap(),
        }
    }
}

fn situation(host: usize, activity: Activity, links: usize) -> Option<Situation> {
    let server = host == SERVER;
    let generation = if activity == Activity::AddLinkKeys { v1() } else { v2() };
    let mut pair = match links {
        0 => Pair::usual(generation, [2, 2]),
        1 => one_link(generation, host),
        _ => Pair::running(generation, [2, 2]),
    };
    let now = pair.now;
    match (activity, links) {
        (Activity::FirstConfirmLink, 0) => {}
        (Activity::FirstReply, 0) if !server => pair = Pair::usual(v21(1), [1, 1]),
        (Activity::FirstAddLink, 0) if !server => {}
        (Activity::Preparing, 0) => pair.hosts[host].lazy = true,
        (Activity::AddLink, 0) if server => {}
        (Activity::AddLinkKeys | Activity::ConfirmLink, 0) => {}
        (Activity::Preparing, 1) => {
            pair.hosts[host].lazy = true;
            pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 1), now);
        }
        (Activity::AddLink, 1) if server => {
            pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 1), now);
        }
        (Activity::AddLinkKeys | Activity::ConfirmLink, 1) => {
            pair.hosts[SERVER].group.handle_rnic_up(rnic(SERVER, 1), now);
        }
        (Activity::RequestAddLink, 1) if !server => {
            pair.hosts[CLIENT].group.handle_rnic_up(rnic(CLIENT, 1), now);
        }
        (Activity::DeleteLink, 2) => {
            let second = pair.active(host)[1];
            pair.hosts[host].group.delete_link(second, DeleteReason::OPERATOR, now);
        }
        (Activity::ConfirmRkey, 1 | 2) => pair.add_rmb(host, 7),
        (Activity::DeleteRkey, 1 | 2) => {
            pair.add_rmb(host, 7);
            pair.run_until_idle();
            pair.hosts[host].group.remove_rmb(RmbId(7), pair.now);
        }
        (Activity::Idle, 1 | 2) => {}
        (Activity::Ending, 2) => pair.hosts[host].group.terminate(DeleteReason::OPERATOR, now),
        (Activity::Over, 2) => pair.hosts[host].group.handle_decline(now),
        _ => return None,
    }
    if activity == Activity::Over {
        pair.fail(host, LinkKey::FIRST);
        let last = pair.active(host);
        last.into_iter().for_each(|link| pair.fail(host, link));
    }
    Some(until(pair, host, activity))
}

const ACTIVITIES: [Activity; 14] = [
    Activity::FirstConfirmLink,
    Activity::FirstReply,
    Activity::FirstAddLink,
    Activity::Preparing,
    Activity::AddLink,
    Activity::AddLinkKeys,
    Activity::ConfirmLink,
    Activity::DeleteLink,
    Activity::RequestAddLink,
    Activity::ConfirmRkey,
    Activity::DeleteRkey,
    Activity::Idle,
    Activity::Ending,
    Activity::Over,
];

type Event = fn(&mut Situation) -> Result<(), Anomaly>;

impl Situation {
    fn deliver_message(&mut self, link: LinkKey, message: Message) -> Result<(), Anomaly> {
        let llc = Llc { version: self.generation.version(), message };
        let bytes = llc.emit(&Dialect::SPEC);
        let now = self.pair.now;
        self.pair.hosts[self.host].group.handle_message(link, &bytes, now)
    }

    fn newest(&self) -> LinkRecord {
        let links = self.pair.hosts[self.host].group.links();
        links.last().cloned().unwrap_or_else(links_of_nobody)
    }

    fn confirm(&mut self, reply: bool, qpn: u32) -> Result<(), Anomaly> {
        let link = self.newest();
        let Some(remote) = link.remote else {
            return Err(Anomaly::Malformed(WireError::UnknownLlcType(0)));
        };
        let message = ConfirmLink {
            reply,
            low_flags: 3,
            mac: remote.mac,
            gid: remote.gid,
            qpn: Qpn::new(remote.qpn.get() ^ qpn),
            link_number: link.number.max(1),
            link_user_id: 9,
            max_links: 2,
            max_conns: 16,
        };
        self.deliver_message(link.key, Message::ConfirmLink(message))
    }

    fn add(&mut self, reply: bool, rejected: bool, number: u8) -> Result<(), Anomaly> {
        let peer = 1 - self.host;
        let v1 = self.generation == v1();
        let number = if reply { self.newest().number } else { number };
        let message = AddLink {
            reply,
            rejected: rejected.then_some(RejectReason::NO_PATH),
            mac: rnic(peer, 1).mac,
            gid: rnic(peer, 1).gid,
            qpn: Qpn::new(0x777),
            link_number: number,
            mtu: Mtu::B1024,
            psn: Psn::new(1),
            v2: (!v1).then(AddLinkV2::default),
        };
        self.deliver_message(LinkKey::FIRST, Message::AddLink(message))
    }

    fn delete(&mut self, change: fn(&mut DeleteLink)) -> Result<(), Anomaly> {
        let number = self.newest().number;
        let mut message = DeleteLink {
            link_number: number,
            reason: DeleteReason::OPERATOR,
            ..Default::default()
        };
        change(&mut message);
        self.deliver_message(LinkKey::FIRST, Message::DeleteLink(message))
    }

    fn rkey(&mut self, reply: bool, negative: bool, retry: bool) -> Result<(), Anomaly> {
        let (owner, rmb) = if reply { (self.host, 7) } else { (1 - self.host, 5) };
        let first = first_link(owner).qpn;
        let links = self.pair.hosts[self.host].group.links().iter();
        let others: Vec<LinkRkey> = links
            .filter(|link| link.key != LinkKey::FIRST && link.state == LinkState::Active)
            .map(|link| LinkRkey { link_number: link.number, rkey: Rkey(99), address: 0 })
            .collect();
        let region = region(owner, RmbId(rmb), first);
        let message = ConfirmRkey {
            reply,
            negative,
            retry,
            other_links: others.len() as u8,
            rkey: region.rkey,
            address: region.address,
            others: List::from_slice(&others).unwrap(),
        };
        self.deliver_message(LinkKey::FIRST, Message::ConfirmRkey(message))
    }

    fn fail(&mut self, link: LinkKey) -> Result<(), Anomaly> {
        let now = self.pair.now;
        self.pair.hosts[self.host].group.handle_link_failed(link, Cause::QueuePair, now);
        Ok(())
    }
}

fn links_of_nobody() -> LinkRecord {
    let params = params_of(v2(), PeerProfile::SPEC, [1, 1]);
    let [server, _] = params;
    LinkGroup::new(server, first_link(SERVER), smc_core::time::Tick(0)).links()[0].clone()
}

fn events(host: usize) -> Vec<(&'static str, Event)> {
    let server = host == SERVER;
    let mut events: Vec<(&'static str, Event)> = Vec::new();
    if server {
        events.push(("Confirm Link reply", |s| s.confirm(true, 0)));
        events.push(("Confirm Link reply, wrong", |s| s.confirm(true, 1)));
        events.push(("Add Link reply", |s| s.add(true, false, 0)));
        events.push(("Add Link reply, refused", |s| s.add(true, true, 0)));
        events.push(("Request Add Link", |s| {
            let gids = GidList { active: rnic(CLIENT, 1).gid, alternates: List::new() };
            s.deliver_message(
                LinkKey::FIRST,
                Message::RequestAddLink(RequestAddLink::Request(gids)),
            )
        }));
    } else {
        events.push(("Confirm Link", |s| s.confirm(false, 0)));
        events.push(("Confirm Link, wrong", |s| s.confirm(false, 1)));
        events.push(("Add Link", |s| s.add(false, false, 77)));
        events.push(("Request Add Link reply", |s| {
            s.deliver_message(LinkKey::FIRST, Message::RequestAddLink(RequestAddLink::Reply(None)))
        }));
    }
    events.push(("continuation, last", |s| {
        let reply = s.host == SERVER;
        let link_number = s.newest().number;
        let message = AddLinkCont { reply, link_number, left: 0, rkeys: List::new() };
        s.deliver_message(LinkKey::FIRST, Message::AddLinkCont(message))
    }));
    events.push(("Delete Link, newest", |s| s.delete(|_| {})));
    events.push(("Delete Link, newest, orderly", |s| s.delete(|m| m.orderly = true)));
    events.push(("Delete Link, unknown", |s| s.delete(|m| m.link_number = 200)));
    events.push(("Delete Link reply", |s| s.delete(|m| m.reply = true)));
    events.push(("Delete Link, all", |s| s.delete(|m| (m.all, m.link_number) = (true, 0))));
    events.push(("Confirm RKey", |s| s.rkey(false, false, false)));
    events.push(("Confirm RKey reply", |s| s.rkey(true, false, false)));
    events.push(("Confirm RKey reply, refused", |s| s.rkey(true, true, false)));
    events.push(("Confirm RKey reply, later", |s| s.rkey(true, true, true)));
    events.push(("Delete RKey", |s| {
        let rkey = region(1 - s.host, RmbId(0), first_link(1 - s.host).qpn).rkey;
        let message = DeleteRkey { rkeys: vec![rkey], ..Default::default() };
        s.deliver_message(LinkKey::FIRST, Message::DeleteRkey(message))
    }));
    events.push(("Delete RKey reply", |s| match s.generation == v1() {
        true => {
            let rkeys = vec![Rkey(1)];
            let message = DeleteRkey { reply: true, rkeys, ..Default::default() };
            s.deliver_message(LinkKey::FIRST, Message::DeleteRkey(message))
        }
        false => {
            s.deliver_message(LinkKey::FIRST, Message::DeleteRkeyReply(DeleteRkeyReply::default()))
        }
    }));
    events.push(("Test Link", |s| {
        s.deliver_message(LinkKey::FIRST, Message::TestLink(TestLink::default()))
    }));
    events.push(("Test Link reply", |s| {
        let message = TestLink { reply: true, ..Default::default() };
        s.deliver_message(LinkKey::FIRST, Message::TestLink(message))
    }));
    events.push(("queue pair made", |s| {
        let link = s.newest().key;
        s.pair.prepare(s.host, link);
        Ok(())
    }));
    events.push(("first link fails", |s| s.fail(LinkKey::FIRST)));
    events.push(("newest link fails", |s| {
        let link = s.newest().key;
        s.fail(link)
    }));
    events.push(("timer", |s| {
        let group = &mut s.pair.hosts[s.host].group;
        if let Some(at) = group.poll_timeout() {
            group.handle_timeout(at);
        }
        Ok(())
    }));
    events.push(("RNIC comes", |s| {
        let (host, now) = (s.host, s.pair.now);
        s.pair.hosts[host].group.handle_rnic_up(rnic(host, 2), now);
        Ok(())
    }));
    events.push(("new RMB", |s| {
        if s.pair.hosts[s.host].group.has_room() {
            s.pair.add_rmb(s.host, 8);
        }
        Ok(())
    }));
    events.push(("SMC Decline", |s| {
        s.pair.hosts[s.host].group.handle_decline(s.pair.now);
        Ok(())
    }));
    events.push(("terminate", |s| {
        let now = s.pair.now;
        s.pair.hosts[s.host].group.terminate(DeleteReason::OPERATOR, now);
        Ok(())
    }));
    events
}

fn describe(output: &Output) -> String {
    match output {
        Output::PostLlc { bytes, link, .. } => {
            let name = name(SERVER, bytes, &Dialect::SPEC);
            format!("send {} on link {}", &name[2..], link.get())
        }
        Output::PrepareLink { link, .. } => format!("prepare link {}", link.get()),
        Output::ConnectLink { link, .. } => format!("connect link {}", link.get()),
        Output::ActivateLink { link } => format!("activate link {}", link.get()),
        Output::LinkUsable { link } => format!("link {} usable", link.get()),
        Output::DestroyLink { link } => format!("destroy link {}", link.get()),
        Output::MoveConnections { from, to, dead } => {
            let how = if *dead { "" } else { " in peace" };
            format!("move {} to {}{how}", from.get(), to.get())
        }
        Output::Terminated { reason, ending } => format!("**over**: {reason:?}, {ending:?}"),
        other => {
            let text = format!("{other:?}");
            text.split([' ', '{']).next().unwrap_or_default().to_owned()
        }
    }
}

// Shows: LLCV2-8.
#[test]
fn table_of_exchanges_is_up_to_date() {
    let mut out = format!(
        "# Exchanges of a link group\n\n{HEAD}\n\nA section per role, what the group waits for, and \
         the number of links that were in use before. Flags of messages are in hexadecimal.\n\
         Link 0 is the first. Events that change nothing and send nothing are listed below each \
         table, with the anomaly they count as.\n"
    );
    for host in [SERVER, CLIENT] {
        for activity in ACTIVITIES {
            for links in 0..3 {
                if situation(host, activity, links).is_some() {
                    section(&mut out, host, activity, links);
                }
            }
        }
    }
    check("exchange_table.md", &out);
}

fn section(out: &mut String, host: usize, activity: Activity, links: usize) {
    let role = ["Server", "Client"][host];
    let _ = write!(
        out,
        "\n## {role}, {activity:?}, {links} links\n\n| event | then | does |\n|---|---|---|\n"
    );
    let mut quiet = Vec::new();
    for (name, event) in events(host) {
        let mut situation = situation(host, activity, links).unwrap();
        let result = event(&mut situation);
        situation.pair.drain(host);
        let this = &situation.pair.hosts[host];
        let now = this.group.activity();
        let anomaly = result.err().map(|anomaly| format!(" ({:?})", anomaly.kind()));
        let anomaly = anomaly.unwrap_or_default();
        let outputs: Vec<String> = this.outputs.iter().map(describe).collect();
        if now == activity && outputs.is_empty() {
            quiet.push(format!("{name}{anomaly}"));
            continue;
        }
        let then = if now == activity { "same".to_owned() } else { format!("**{now:?}**") };
        let _ = writeln!(out, "| {name}{anomaly} | {then} | {} |", outputs.join("; "));
    }
    let _ = write!(out, "\nwithout effect: {}\n", quiet.join("; "));
}
