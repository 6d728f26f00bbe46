// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! RMBs of the peer: Confirm RKey and Delete RKey as answers.

use super::exchange::PeerConfirm;
use super::{
    Anomaly, Cause, LinkExchange, LinkGroup, LinkKey, Output, PeerRmbId, Region, UseError,
};
use crate::time::Tick;
use crate::wire::List;
use crate::wire::ids::Rkey;
use crate::wire::llc::{
    ConfirmRkey, ConfirmRkeyCont, DeleteRkey, DeleteRkeyReply, LinkRkey, Message,
};

/// Maximum number of Delete RKeys waiting for the end of an exchange; a peer has one under way at a
/// time.
const MOST_KEPT: usize = 4;

impl LinkGroup {
    /// Whether the set of links is being changed, so keys may not change (LLC-62).
    fn links_change(&self) -> bool {
        matches!(self.link_exchange, Some(LinkExchange::Add(_) | LinkExchange::Delete { .. }))
            && !self.params.profile.rkeys_at_once
    }

    /// The peer has a new RMB, or confirms one again, at any time (LLC-53).
    pub(super) fn on_confirm_rkey(
        &mut self,
        key: LinkKey,
        message: &ConfirmRkey,
        now: Tick,
    ) -> Result<(), Anomaly> {
        self.keys.peer_confirm = None;
        if self.links_change() {
            // The peer starts over when the new set of links is known (LLC-67, LLC-70, LLC-72,
            // LLC-74). LLCV2-33.
            let reply = ConfirmRkey { reply: true, negative: true, retry: true, ..*message };
            self.post(key, Message::ConfirmRkey(reply));
            return Ok(());
        }
        let region = Region { rkey: message.rkey, address: message.address };
        let entries: Vec<LinkRkey> = message.others.iter().copied().collect();
        let there = u8::try_from(entries.len()).unwrap_or(u8::MAX);
        let left = message.other_links.saturating_sub(there);
        // LLC-49.
        let mut reply = ConfirmRkey { reply: true, ..*message };
        if left > 0 {
            self.keys.peer_confirm = Some(PeerConfirm { link: key, region, entries, left });
            self.post(key, Message::ConfirmRkey(reply));
            return Ok(());
        }
        let result = self.learn_rmb(key, region, &entries);
        reply.negative = result == Err(Anomaly::TooManyRmbs);
        self.post(key, Message::ConfirmRkey(reply));
        self.fail_keyless(key, &entries, &result, now);
        result
    }

    /// Version 1: more links of the same RMB.
    pub(super) fn on_confirm_rkey_cont(
        &mut self,
        key: LinkKey,
        message: &ConfirmRkeyCont,
        now: Tick,
    ) -> Result<(), Anomaly> {
        let Some(confirm) = self.keys.peer_confirm.take_if(|confirm| confirm.link == key) else {
            return Err(Anomaly::WrongTime("Confirm RKey Continuation"));
        };
        let PeerConfirm { region, mut entries, left, .. } = confirm;
        if message.left != left {
            return Err(Anomaly::WrongCount { left: message.left, expected: left });
        }
        entries.extend(message.entries.iter().copied());
        let mut reply = ConfirmRkeyCont { reply: true, ..*message };
        let left = left.saturating_sub(3);
        if left > 0 {
            self.keys.peer_confirm = Some(PeerConfirm { link: key, region, entries, left });
            self.post(key, Message::ConfirmRkeyCont(reply));
            return Ok(());
        }
        let result = self.learn_rmb(key, region, &entries);
        reply.negative = result == Err(Anomaly::TooManyRmbs);
        self.post(key, Message::ConfirmRkeyCont(reply));
        self.fail_keyless(key, &entries, &result, now);
        result
    }

    fn learn_rmb(
        &mut self,
        key: LinkKey,
        region: Region,
        entries: &[LinkRkey],
    ) -> Result<(), Anomaly> {
        // LG-52.
        let id = self.keys.peer_rmbs.learn(key, region).ok_or(Anomaly::TooManyRmbs)?;
        let mut result = Ok(());
        for entry in entries {
            match self.by_number(entry.link_number) {
                Some(link) if link != key => {
                    let region = Region { rkey: entry.rkey, address: entry.address };
                    self.keys.peer_rmbs.set(id, link, region);
                }
                _ => result = Err(Anomaly::UnknownLink(entry.link_number)),
            }
        }
        result
    }

    /// Fails a link without a key at the peer: the link does not work at the peer's end (ERR-41).
    fn fail_keyless(
        &mut self,
        key: LinkKey,
        entries: &[LinkRkey],
        result: &Result<(), Anomaly>,
        now: Tick,
    ) {
        if *result == Err(Anomaly::TooManyRmbs) {
            return;
        }
        let named = |number: u8| entries.iter().any(|entry| entry.link_number == number);
        let without = self.active().filter(|link| link.key != key && !named(link.number));
        let without: Vec<(LinkKey, u8)> = without.map(|link| (link.key, link.number)).collect();
        for (link, number) in without {
            self.counters.count(&Anomaly::KeyMissing(number));
            self.fail_link(link, Cause::KeyMissing, now);
        }
    }

    /// The peer has freed RMBs (LLC-54). The answer is postponed while links change (LLC-78).
    pub(super) fn on_delete_rkey(
        &mut self,
        key: LinkKey,
        message: DeleteRkey,
    ) -> Result<(), Anomaly> {
        if self.links_change() && self.keys.kept.len() < MOST_KEPT {
            self.keys.kept.push_back((key, message));
            return Ok(());
        }
        self.delete_peer_rmbs(key, message)
    }

    /// Answers postponed requests.
    pub(super) fn answer_kept(&mut self) {
        while let Some((key, message)) = self.keys.kept.pop_front() {
            if let Err(anomaly) = self.delete_peer_rmbs(key, message) {
                self.counters.count(&anomaly);
            }
        }
    }

    fn delete_peer_rmbs(&mut self, key: LinkKey, message: DeleteRkey) -> Result<(), Anomaly> {
        let mut unknown: Vec<Rkey> = Vec::new();
        let mut mask = 0_u8;
        for (n, rkey) in message.rkeys.iter().enumerate() {
            if let Some(id) = self.keys.peer_rmbs.find(key, *rkey) {
                self.keys.peer_rmbs.remove(id);
                self.outputs.push_back(Output::PeerRmbDeleted { rmb: id });
            } else {
                unknown.push(*rkey);
                // LLC-55.
                mask |= 0x80_u8.checked_shr(u32::try_from(n).unwrap_or(8)).unwrap_or(0);
            }
        }
        let negative = !unknown.is_empty();
        let reply = if self.is_v1() {
            let message = DeleteRkey { reply: true, negative, error_mask: mask, ..message };
            Message::DeleteRkey(message)
        } else {
            let mut rkeys = List::new();
            // At most eight, and only the unknown ones (LLCV2-35, LLCV2-36).
            for rkey in &unknown {
                if rkeys.push(*rkey).is_err() {
                    break;
                }
            }
            let len = |n: usize| u8::try_from(n).unwrap_or(u8::MAX);
            let (count, not_deleted) = (len(message.rkeys.len()), len(unknown.len()));
            Message::DeleteRkeyReply(DeleteRkeyReply { negative, count, not_deleted, rkeys })
        };
        self.post(key, reply);
        if negative { Err(Anomaly::UnknownRkey) } else { Ok(()) }
    }

    /// The peer's RMB, named in SMC Accept or Confirm by a region on a link. An unknown RMB is
    /// adopted, as in Linux.
    ///
    /// # Errors
    /// [`UseError::Over`], [`UseError::NoLink`], [`UseError::TooManyRmbs`].
    pub fn bind_peer_rmb(&mut self, link: LinkKey, region: Region) -> Result<PeerRmbId, UseError> {
        if self.is_over() {
            return Err(UseError::Over);
        }
        if !self.state_of(link).carries() {
            return Err(UseError::NoLink(link));
        }
        self.keys.peer_rmbs.learn(link, region).ok_or(UseError::TooManyRmbs)
    }

    /// Where to write into an RMB of the peer over a link, or `None` if the peer has named no key
    /// there or has deleted the RMB.
    pub fn peer_region(&self, rmb: PeerRmbId, link: LinkKey) -> Option<Region> {
        self.keys.peer_rmbs.on(rmb, link)
    }

    /// The RMB of the peer with this key on a link.
    pub fn find_peer_rmb(&self, link: LinkKey, rkey: Rkey) -> Option<PeerRmbId> {
        self.keys.peer_rmbs.find(link, rkey)
    }

    /// RMBs of the peer, at most [`super::MAX_RMBS`].
    pub fn peer_rmbs(&self) -> usize {
        self.keys.peer_rmbs.len()
    }
}
