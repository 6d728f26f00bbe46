// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Own RMBs: Confirm RKey and Delete RKey as requests (RFC 7609 section 3.5.5.2).

use super::exchange::RkeyExchange;
use super::{
    Anomaly, LinkGroup, LinkKey, LinkState, MAX_RMBS, Output, Phase, Region, Rmb, RmbId, RmbState,
    UseError,
};
use crate::time::Tick;
use crate::wire::List;
use crate::wire::llc::{ConfirmRkey, ConfirmRkeyCont, DeleteRkey, LinkRkey, Message};

/// Maximum number of attempts for a Confirm RKey refused "for now".
const MOST_REFUSALS: u32 = 8;

impl LinkGroup {
    /// Tells the peer of an own RMB with its region on each link of [`LinkGroup::key_links`];
    /// `on` is the link the first connection wants. The answer is [`Output::RmbConfirmed`] or
    /// [`Output::RmbRefused`] (LLC-46, LLC-51).
    ///
    /// # Errors
    /// [`UseError`]; nothing has happened then.
    pub fn add_rmb(
        &mut self,
        rmb: RmbId,
        on: Option<LinkKey>,
        regions: &[(LinkKey, Region)],
        now: Tick,
    ) -> Result<(), UseError> {
        if matches!(self.phase, Phase::Over | Phase::Ending(_)) {
            return Err(UseError::Over);
        }
        if self.keys.rmbs.iter().any(|have| have.id == rmb) {
            return Err(UseError::KnownRmb(rmb));
        }
        if self.keys.rmbs.len() >= MAX_RMBS {
            return Err(UseError::TooManyRmbs);
        }
        let has = |link: &LinkKey| regions.iter().any(|(key, _)| key == link);
        if let Some(missing) = self.key_links().find(|link| !has(link)) {
            return Err(UseError::KeyMissing(missing));
        }
        let there = |(link, _): &&(LinkKey, Region)| self.link(*link).is_some();
        let keys =
            regions.iter().filter(there).map(|(link, region)| (*link, *region, false)).collect();
        self.keys.rmbs.push(Rmb {
            id: rmb,
            state: RmbState::Unconfirmed,
            reported: false,
            keys,
            on,
            refused: 0,
            not_before: None,
        });
        self.pump(now);
        Ok(())
    }

    /// Reports the end of an own RMB without connections to the peer (RMB-15). The answer is
    /// [`Output::RmbDeleted`] (LLC-57).
    pub fn remove_rmb(&mut self, rmb: RmbId, now: Tick) {
        if let Some(rmb) = self.keys.rmbs.iter_mut().find(|have| have.id == rmb) {
            rmb.state = RmbState::Unwanted;
        }
        self.pump(now);
    }

    /// Where an own RMB stands.
    pub fn rmb_state(&self, rmb: RmbId) -> Option<RmbState> {
        self.keys.rmbs.iter().find(|have| have.id == rmb).map(|have| have.state)
    }

    /// Begins the next due exchange of keys, if any.
    pub(super) fn start_rkeys(&mut self, now: Tick) {
        let Some(carrier) = self.carrier(None) else { return };
        if self.start_delete_rkeys(carrier, now) {
            return;
        }
        let active: Vec<LinkKey> = self.active().map(|link| link.key).collect();
        let due = |rmb: &&mut Rmb| {
            let unknown =
                |link: &LinkKey| !rmb.keys.iter().any(|(key, _, known)| key == link && *known);
            rmb.state != RmbState::Unwanted
                && (rmb.state == RmbState::Unconfirmed || active.iter().any(unknown))
                && rmb.not_before.is_none_or(|at| at.has_passed(now))
        };
        let Some(rmb) = self.keys.rmbs.iter_mut().find(due) else { return };
        rmb.state = RmbState::Unconfirmed;
        rmb.not_before = None;
        let wanted = rmb.on.filter(|on| active.contains(on));
        // LLC-52.
        let over = wanted.unwrap_or(carrier);
        let id = rmb.id;
        let keys: Vec<(LinkKey, Region)> =
            rmb.keys.iter().map(|(link, region, _)| (*link, *region)).collect();
        let on = |link: LinkKey| keys.iter().find(|(key, _)| *key == link).map(|(_, r)| *r);
        if let Some(region) = on(over)
            && active.iter().all(|link| on(*link).is_some())
        {
            let others: Vec<LinkKey> = active.into_iter().filter(|link| *link != over).collect();
            let entries = others.iter().filter_map(|link| {
                let region = on(*link)?;
                let link_number = self.link(*link)?.number;
                Some(LinkRkey { link_number, rkey: region.rkey, address: region.address })
            });
            let entries: Vec<LinkRkey> = entries.collect();
            self.send_confirm_rkey((over, id, region), others, entries, now);
        } else {
            self.refuse_rmb(id);
        }
    }

    fn send_confirm_rkey(
        &mut self,
        (over, rmb, region): (LinkKey, RmbId, Region),
        mut links: Vec<LinkKey>,
        entries: Vec<LinkRkey>,
        now: Tick,
    ) {
        // LLCV2-32.
        let most = if self.is_v1() { 8 } else { 2 };
        links.truncate(most);
        links.push(over);
        let mut rest: Vec<LinkRkey> = entries.into_iter().take(most).collect();
        let other_links = u8::try_from(rest.len()).unwrap_or(u8::MAX);
        let mut others = List::new();
        for entry in rest.drain(..rest.len().min(2)) {
            let _ = others.push(entry);
        }
        let Region { rkey, address } = region;
        let message = ConfirmRkey { other_links, rkey, address, others, ..ConfirmRkey::default() };
        self.post(over, Message::ConfirmRkey(message));
        let until = now.after(self.params.timers.reply);
        self.keys.exchange =
            Some(RkeyExchange::Confirm { over, until, rmb, region, links, rest, left: 0 });
    }

    /// Version 1: the next entries (LLC-47, LLC-48).
    fn send_confirm_cont(&mut self, now: Tick) -> bool {
        let until_next = now.after(self.params.timers.reply);
        let Some(RkeyExchange::Confirm { over, until, rest, left, .. }) = &mut self.keys.exchange
        else {
            return false;
        };
        if rest.is_empty() {
            return false;
        }
        *left = u8::try_from(rest.len()).unwrap_or(u8::MAX);
        *until = until_next;
        let mut entries = List::new();
        for entry in rest.drain(..rest.len().min(3)) {
            let _ = entries.push(entry);
        }
        let (over, left) = (*over, *left);
        let message = ConfirmRkeyCont { left, entries, ..ConfirmRkeyCont::default() };
        self.post(over, Message::ConfirmRkeyCont(message));
        true
    }

    pub(super) fn on_confirm_rkey_reply(
        &mut self,
        key: LinkKey,
        message: &ConfirmRkey,
        now: Tick,
    ) -> Result<(), Anomaly> {
        match &self.keys.exchange {
            Some(RkeyExchange::Confirm { over, region, left: 0, .. })
                if *over == key && region.rkey == message.rkey => {}
            _ => return Err(Anomaly::UnexpectedReply("Confirm RKey")),
        }
        self.on_confirm_answer(message.negative, message.retry, now);
        Ok(())
    }

    pub(super) fn on_confirm_rkey_cont_reply(
        &mut self,
        key: LinkKey,
        message: &ConfirmRkeyCont,
        now: Tick,
    ) -> Result<(), Anomaly> {
        match &self.keys.exchange {
            // ERR-38.
            Some(RkeyExchange::Confirm { over, left, .. })
                if *over == key && *left > 0 && *left == message.left => {}
            _ => return Err(Anomaly::UnexpectedReply("Confirm RKey Continuation")),
        }
        self.on_confirm_answer(message.negative, false, now);
        Ok(())
    }

    fn on_confirm_answer(&mut self, negative: bool, retry: bool, now: Tick) {
        if !negative && self.send_confirm_cont(now) {
            return;
        }
        let Some(RkeyExchange::Confirm { rmb: id, links, .. }) = self.keys.exchange.take() else {
            return;
        };
        let active: Vec<LinkKey> = self.active().map(|link| link.key).collect();
        let again = now.after(self.params.timers.retry_rkey);
        let Some(rmb) = self.keys.rmbs.iter_mut().find(|rmb| rmb.id == id) else { return };
        if negative {
            self.counters.rkeys_refused += 1;
            rmb.refused += 1;
            if retry && rmb.refused < MOST_REFUSALS {
                // With the keys of then (LLC-50).
                rmb.not_before = Some(again);
            } else {
                self.refuse_rmb(id);
            }
            return;
        }
        rmb.refused = 0;
        for (link, _, known) in &mut rmb.keys {
            *known |= links.contains(link);
        }
        // A link may have come meanwhile; then there is one more round (LLC-51, LLC-67).
        let all = active.iter().all(|link| rmb.keys.iter().any(|(key, _, k)| key == link && *k));
        if all && rmb.state == RmbState::Unconfirmed {
            rmb.state = RmbState::Confirmed;
            if !rmb.reported {
                rmb.reported = true;
                self.outputs.push_back(Output::RmbConfirmed { rmb: id });
            }
        }
    }

    /// The peer refuses an RMB. An RMB confirmed before stays confirmed.
    fn refuse_rmb(&mut self, id: RmbId) {
        let Some(at) = self.keys.rmbs.iter().position(|rmb| rmb.id == id) else { return };
        let reported = self.keys.rmbs.get(at).is_some_and(|rmb| rmb.reported);
        if reported {
            if let Some(rmb) = self.keys.rmbs.get_mut(at) {
                rmb.state = RmbState::Confirmed;
                rmb.keys.iter_mut().for_each(|(_, _, known)| *known = true);
            }
        } else {
            self.keys.rmbs.remove(at);
            self.outputs.push_back(Output::RmbRefused { rmb: id });
        }
    }

    /// Deletes unwanted RMBs, as many as fit into one message (LLC-54, LLCV2-34).
    fn start_delete_rkeys(&mut self, over: LinkKey, now: Tick) -> bool {
        // Linux is known not to accept two long messages at a time.
        let short = self.is_v1() || self.params.profile.rkeys_at_once;
        let most = if short { 8 } else { 255 };
        let known = |rmb: &Rmb| rmb.keys.iter().any(|(_, _, known)| *known);
        // The peer knows nothing of a never confirmed RMB.
        let never = self.keys.rmbs.iter().filter(|r| r.state == RmbState::Unwanted && !known(r));
        for id in never.map(|rmb| rmb.id).collect::<Vec<_>>() {
            self.keys.rmbs.retain(|rmb| rmb.id != id);
            self.outputs.push_back(Output::RmbDeleted { rmb: id });
        }
        let unwanted = self.keys.rmbs.iter().filter(|rmb| rmb.state == RmbState::Unwanted);
        let chosen: Vec<(RmbId, Region)> =
            unwanted.filter_map(|rmb| Some((rmb.id, rmb.on(over)?))).take(most).collect();
        if chosen.is_empty() {
            return false;
        }
        let rkeys = chosen.iter().map(|(_, region)| region.rkey).collect();
        self.post(over, Message::DeleteRkey(DeleteRkey { rkeys, ..DeleteRkey::default() }));
        let until = now.after(self.params.timers.reply);
        let rmbs = chosen.into_iter().map(|(id, _)| id).collect();
        self.keys.exchange = Some(RkeyExchange::Delete { over, until, rmbs });
        true
    }

    /// The peer has forgotten the RMBs, or never knew them, with the same effect (LLC-56).
    pub(super) fn on_delete_rkey_reply(&mut self, key: LinkKey) -> Result<(), Anomaly> {
        match &self.keys.exchange {
            Some(RkeyExchange::Delete { over, .. }) if *over == key => {}
            _ => return Err(Anomaly::UnexpectedReply("Delete RKey")),
        }
        let Some(RkeyExchange::Delete { rmbs, .. }) = self.keys.exchange.take() else {
            return Ok(());
        };
        for id in rmbs {
            self.keys.rmbs.retain(|rmb| rmb.id != id);
            self.outputs.push_back(Output::RmbDeleted { rmb: id });
        }
        Ok(())
    }

    /// Links for which [`LinkGroup::add_rmb`] needs a region: links with a queue pair and without a
    /// pending end.
    pub fn key_links(&self) -> impl Iterator<Item = LinkKey> + '_ {
        let has_keys = |link: &&super::LinkRecord| {
            !matches!(link.state, LinkState::Preparing | LinkState::Failed | LinkState::Deleting)
        };
        self.links.iter().filter(has_keys).map(|link| link.key)
    }
}
