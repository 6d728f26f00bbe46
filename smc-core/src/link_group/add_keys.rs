// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Keys of a new link: inside Add Link in version 2, by continuations in version 1 (RFC 7609 section
//! 3.5.5.2.3; LLC-27 to LLC-32, LLCV2-17).

use super::{Add, Anomaly, LinkExchange, LinkGroup, LinkKey, Region, Stage};
use crate::time::Tick;
use crate::wire::List;
use crate::wire::llc::{AddLinkCont, Message, RkeyPair};

impl LinkGroup {
    /// Pairs of the own RMBs known to the peer on the carrying link (LLC-31).
    pub(super) fn own_pairs(&mut self, over: LinkKey, new: LinkKey) -> Vec<RkeyPair> {
        let mut pairs = Vec::new();
        let mut announced = Vec::new();
        for rmb in &self.keys.rmbs {
            let known = rmb.keys.iter().any(|(link, _, known)| *link == over && *known);
            if let (true, Some(old), Some(region)) = (known, rmb.on(over), rmb.on(new)) {
                let (reference, address) = (old.rkey, region.address);
                pairs.push(RkeyPair { reference, new: region.rkey, address });
                announced.push(rmb.id);
            }
        }
        if let Some(LinkExchange::Add(add)) = &mut self.link_exchange {
            add.announced = announced;
        }
        pairs
    }

    /// Takes the peer's keys on the new link (LLC-31).
    pub(super) fn take_pairs(
        &mut self,
        over: LinkKey,
        new: LinkKey,
        pairs: &[RkeyPair],
    ) -> Result<(), Anomaly> {
        let mut result = Ok(());
        for pair in pairs {
            match self.keys.peer_rmbs.find(over, pair.reference) {
                Some(id) => {
                    let region = Region { rkey: pair.new, address: pair.address };
                    self.keys.peer_rmbs.set(id, new, region);
                }
                None => result = Err(Anomaly::UnknownRkey),
            }
        }
        result
    }

    /// Version 1: the next continuation, with at most two pairs (LLC-27, LLC-29).
    pub(super) fn send_keys(&mut self, over: LinkKey, now: Tick) {
        let reply = !self.is_server();
        let Some(LinkExchange::Add(Add { stage: Stage::Keys(keys), number, .. })) =
            &mut self.link_exchange
        else {
            return;
        };
        let left = u8::try_from(keys.own.len()).unwrap_or(u8::MAX);
        let mut rkeys = List::new();
        for pair in keys.own.drain(..keys.own.len().min(2)) {
            let _ = rkeys.push(pair);
        }
        let message = AddLinkCont { reply, link_number: *number, left, rkeys };
        self.post(over, Message::AddLinkCont(message));
        let until = self.add_deadline(now);
        if let Some(LinkExchange::Add(add)) = &mut self.link_exchange {
            add.until = until;
        }
    }

    /// Version 1: a continuation of the peer (LLC-28, LLC-30, ERR-38).
    pub(super) fn on_add_cont(
        &mut self,
        key: LinkKey,
        message: AddLinkCont,
        now: Tick,
    ) -> Result<(), Anomaly> {
        let server = self.is_server();
        let Some(LinkExchange::Add(add)) = &mut self.link_exchange else {
            return Err(Anomaly::WrongTime("Add Link Continuation"));
        };
        let (Stage::Keys(keys), Some(new)) = (&mut add.stage, add.new) else {
            return Err(Anomaly::WrongTime("Add Link Continuation"));
        };
        if add.over != key || add.number != message.link_number {
            return Err(Anomaly::WrongTime("Add Link Continuation"));
        }
        if message.left > 0 && keys.last == Some(message.left) {
            return Err(Anomaly::Repeated("Add Link Continuation"));
        }
        if let Some(expected) = keys.expected
            && expected != message.left
        {
            return Err(Anomaly::WrongCount { left: message.left, expected });
        }
        let more = message.left.saturating_sub(2);
        (keys.expected, keys.last) = (Some(more), Some(message.left));
        let unknown = self.take_pairs(key, new, &message.rkeys);
        if !server {
            self.send_keys(key, now);
        }
        let own_left = matches!(
            &self.link_exchange,
            Some(LinkExchange::Add(Add { stage: Stage::Keys(keys), .. })) if !keys.own.is_empty()
        );
        match (server, own_left || more > 0) {
            (true, true) => self.send_keys(key, now),
            (true, false) => self.send_confirm(new, now),
            (false, true) => {}
            (false, false) => {
                self.set_stage(Stage::Confirm, now.after(self.params.timers.confirm_added));
            }
        }
        unknown
    }
}
