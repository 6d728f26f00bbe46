// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Generators of meaningful messages: fields without a meaning beside others are empty.

use proptest::array::uniform;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::wire::cdc::{Cdc, ProducerFlags, StateFlags};
use crate::wire::clc::{self as clc_message, *};
use crate::wire::ids::*;
use crate::wire::llc::{self, *};
use crate::wire::record::{MAX_CLC, MAX_DATA, Reason, Record};
use crate::wire::{Cursor, List};

fn list<T: Copy + Default + core::fmt::Debug, const N: usize>(
    item: impl Strategy<Value = T>,
    at_least: usize,
) -> impl Strategy<Value = List<T, N>> {
    vec(item, at_least..=N).prop_map(|items| List::from_slice(&items).unwrap())
}

fn gid() -> impl Strategy<Value = Gid> {
    uniform::<_, 16>(any::<u8>()).prop_map(Gid)
}

fn gid_v1() -> impl Strategy<Value = GidV1> {
    uniform::<_, 8>(any::<u8>()).prop_map(GidV1)
}

fn mac() -> impl Strategy<Value = Mac> {
    uniform::<_, 6>(any::<u8>()).prop_map(Mac)
}

fn peer_id() -> impl Strategy<Value = PeerId> {
    uniform::<_, 8>(any::<u8>()).prop_map(PeerId)
}

fn eid() -> impl Strategy<Value = Eid> {
    prop_oneof![
        "[A-Z0-9][A-Z0-9-]{0,31}".prop_map(|name| Eid::new(&name).unwrap()),
        uniform::<_, 32>(any::<u8>()).prop_map(Eid::from_wire),
    ]
}

fn chid() -> impl Strategy<Value = Chid> {
    prop_oneof![any::<u16>(), 0xff00..=0xffff_u16].prop_map(Chid)
}

fn size(max: u8) -> impl Strategy<Value = SizeCode> {
    (0..=max).prop_map(|code| SizeCode::new(code).unwrap())
}

fn subnet() -> impl Strategy<Value = Subnet> {
    let prefix = (uniform::<_, 16>(any::<u8>()), 0..=128_u8)
        .prop_map(|(address, bits)| IpPrefix { address, bits });
    prop_oneof![
        (uniform::<_, 4>(any::<u8>()), 0..=32_u8)
            .prop_map(|(network, bits)| Subnet::V4 { network, bits }),
        list(prefix, 1).prop_map(Subnet::V6),
    ]
}

fn types() -> impl Strategy<Value = SmcTypes> {
    prop_oneof![Just(SmcTypes::R), Just(SmcTypes::D), Just(SmcTypes::Both)]
}

fn vendor() -> impl Strategy<Value = VendorOffer> {
    (uniform::<_, 3>(1..=255_u8), uniform::<_, 5>(any::<u8>()))
        .prop_map(|(oui, options)| VendorOffer::new(oui, options).unwrap())
}

fn features() -> impl Strategy<Value = Features> {
    any::<u16>().prop_map(Features::from_bits_truncate)
}

fn limits() -> impl Strategy<Value = LinkLimits> {
    any::<(u8, u8)>().prop_map(|(max_conns, max_links)| LinkLimits { max_conns, max_links })
}

fn offer_v2() -> impl Strategy<Value = OfferV2> {
    let entry = (gid_v1(), chid()).prop_map(|(gid, chid)| GidChid { gid, chid });
    let smcd = (prop::option::of(eid()), list(entry, 0))
        .prop_map(|(seid, entries)| SmcdV2Offer { seid, entries });
    let v2_1 = (limits(), features(), prop::option::of(vendor()));
    (types(), 0..16_u8, list(eid(), 0), gid(), v2_1, smcd).prop_map(
        |(types, release, eids, roce_gid, (limits, features, vendor), smcd)| {
            let (r, d, v2_1) = (types.has_r(), types.has_d(), release >= 1);
            OfferV2 {
                types,
                release: Release::from_code(release),
                eids,
                roce_gid: if r { roce_gid } else { Gid::NONE },
                limits: if r && v2_1 { limits } else { LinkLimits::NONE },
                features: if v2_1 { features } else { Features::empty() },
                vendor: vendor.filter(|_| v2_1),
                smcd: if d { smcd } else { SmcdV2Offer::default() },
            }
        },
    )
}

fn proposal() -> impl Strategy<Value = Proposal> {
    let v1 = || (types(), subnet()).prop_map(|(types, subnet)| OfferV1 { types, subnet });
    let v1_form = v1().prop_map(|v1| (Version::V1, Some(v1), None));
    let v2_form = (prop::option::of(v1()), prop::option::of(offer_v2()))
        .prop_map(|(v1, v2)| (Version::V2, v1, v2));
    let form = prop_oneof![v1_form, v2_form];
    (form, peer_id(), gid(), mac(), gid_v1(), chid()).prop_map(
        |((version, v1, v2), peer_id, gid, mac, ism_gid, chid)| {
            let v1_r = v1.is_some_and(|offer| offer.types.has_r());
            let v2_d = v2.is_some_and(|offer| offer.types.has_d());
            let any_d = v2_d || v1.is_some_and(|offer| offer.types.has_d());
            let ism = AssociatedIsm {
                gid: if any_d { ism_gid } else { GidV1::NONE },
                chid: if v2_d { chid } else { Chid::NONE },
            };
            let gid = if v1_r { gid } else { Gid::NONE };
            Proposal { version, peer_id, gid, mac, ism, v1, v2 }
        },
    )
}

fn fce() -> impl Strategy<Value = Fce> {
    let hostname = uniform::<_, 32>(any::<u8>()).prop_map(Hostname::from_wire);
    (0..16_u8, 0..16_u8, hostname, features(), uniform::<_, 4>(any::<u8>())).prop_map(
        |(os, release, hostname, features, vendor)| Fce {
            os: OsType::from_code(os),
            release: Release::from_code(release),
            hostname,
            features: if release >= 1 { features } else { Features::empty() },
            vendor: if release >= 1 { vendor } else { [0; 4] },
        },
    )
}

fn smcd_v1() -> impl Strategy<Value = SmcdV1> {
    (any::<(bool, u64, u8, [u8; 4])>(), gid_v1(), size(6)).prop_map(
        |((first_contact, token, index, link_id), gid, size)| SmcdV1 {
            first_contact,
            gid,
            token: DmbToken(token),
            index,
            size,
            link_id: LinkId(link_id),
        },
    )
}

fn smcd_v2() -> impl Strategy<Value = SmcdV2> {
    let buffer = (any::<(u64, u8, [u8; 4])>(), size(6));
    (buffer, gid(), chid(), eid(), prop::option::of(fce())).prop_map(
        |(((token, index, link_id), size), gid, chid, eid, first_contact)| SmcdV2 {
            gid: match chid.is_emulated() {
                true => gid,
                false => Gid::from_parts(gid.part1(), GidV1::NONE),
            },
            token: DmbToken(token),
            index,
            size,
            link_id: LinkId(link_id),
            chid,
            eid,
            first_contact,
        },
    )
}

fn smcr_link() -> impl Strategy<Value = SmcrLink> {
    let buffer = (any::<(u32, u32, u64)>(), 1..=255_u8, size(15));
    let pair = (any::<(u32, u32)>(), 1..=5_u8);
    (peer_id(), gid(), mac(), buffer, pair).prop_map(
        |(peer_id, gid, mac, ((rkey, token, address), index, size), ((qpn, psn), mtu))| SmcrLink {
            peer_id,
            gid,
            mac,
            qpn: Qpn::new(qpn),
            rkey: Rkey(rkey),
            index,
            token,
            size,
            mtu: Mtu::from_code(mtu),
            address,
            psn: Psn::new(psn),
        },
    )
}

fn gid_list() -> impl Strategy<Value = GidList> {
    (gid(), list(gid(), 0)).prop_map(|(active, alternates)| GidList { active, alternates })
}

fn smcr_v2(confirm: bool) -> impl Strategy<Value = SmcrV2> {
    let smcr_fce = (fce(), any::<bool>(), limits(), gid_list()).prop_map(
        move |(common, direct, limits, gids)| SmcrFce {
            common,
            direct,
            limits: if common.release.code() >= 1 { limits } else { LinkLimits::NONE },
            gids: confirm.then_some(gids),
        },
    );
    (any::<bool>(), smcr_link(), eid(), prop::option::of(smcr_fce)).prop_map(
        move |(reason_saved, link, eid, first_contact)| SmcrV2 {
            reason_saved: reason_saved && !confirm,
            link,
            eid,
            first_contact,
        },
    )
}

fn smcr_v1(confirm: bool) -> impl Strategy<Value = SmcrV1> {
    (any::<bool>(), smcr_link())
        .prop_map(move |(first, link)| SmcrV1 { first_contact: first && !confirm, link })
}

fn decline() -> impl Strategy<Value = Decline> {
    (any::<(bool, bool, u32, [u32; 4])>(), peer_id(), 0..16_u8).prop_map(
        |((v2, out_of_sync, diagnosis, [a, b, c, d]), peer_id, os)| {
            let reasons = TypeReasons {
                smcd_v2: Diagnosis(a),
                smcd_v1: Diagnosis(b),
                smcr_v2: Diagnosis(c),
                smcr_v1: Diagnosis(d),
            };
            Decline {
                version: if v2 { Version::V2 } else { Version::V1 },
                out_of_sync,
                peer_id,
                diagnosis: Diagnosis(diagnosis),
                os: if v2 { OsType::from_code(os) } else { OsType::default() },
                reasons: if v2 { reasons } else { TypeReasons::default() },
            }
        },
    )
}

pub(super) fn clc() -> impl Strategy<Value = clc_message::Message> {
    use clc_message::Message::*;
    prop_oneof![
        4 => proposal().prop_map(Proposal),
        1 => smcr_v1(false).prop_map(AcceptR1),
        1 => smcr_v2(false).prop_map(AcceptR2),
        1 => smcd_v1().prop_map(AcceptD1),
        1 => smcd_v2().prop_map(AcceptD2),
        1 => smcr_v1(true).prop_map(ConfirmR1),
        1 => smcr_v2(true).prop_map(ConfirmR2),
        1 => smcd_v1().prop_map(ConfirmD1),
        1 => smcd_v2().prop_map(ConfirmD2),
        1 => decline().prop_map(Decline),
    ]
}

fn confirm_link(v2: bool) -> impl Strategy<Value = ConfirmLink> {
    (any::<(bool, u32, u8, u32)>(), mac(), gid(), any::<(u8, u8)>(), 0..16_u8).prop_map(
        move |((reply, qpn, link_number, user), mac, gid, (links, conns), low_flags)| ConfirmLink {
            reply,
            low_flags,
            mac,
            gid,
            qpn: Qpn::new(qpn),
            link_number,
            link_user_id: user,
            max_links: links,
            max_conns: if v2 { conns } else { 0 },
        },
    )
}

fn rkey_pair() -> impl Strategy<Value = RkeyPair> {
    any::<(u32, u32, u64)>().prop_map(|(reference, new, address)| RkeyPair {
        reference: Rkey(reference),
        new: Rkey(new),
        address,
    })
}

fn add_link(v2: bool) -> impl Strategy<Value = AddLink> {
    let part = (any::<bool>(), gid(), vec(rkey_pair(), 0..40))
        .prop_map(|(direct, target, rkeys)| AddLinkV2 { direct, target, rkeys });
    let rejected = prop::option::of((0..16_u8).prop_map(RejectReason));
    let link = (any::<(bool, u32, u8, u32)>(), mac(), gid(), 0..16_u8);
    (link, rejected, part, any::<bool>()).prop_map(
        move |(((reply, qpn, link_number, psn), mac, gid, mtu), rejected, part, short)| AddLink {
            reply,
            rejected,
            mac,
            gid,
            qpn: Qpn::new(qpn),
            link_number,
            mtu: Mtu::from_code(mtu),
            psn: Psn::new(psn),
            v2: (v2 && !(short && rejected.is_some())).then_some(part),
        },
    )
}

fn link_rkey() -> impl Strategy<Value = LinkRkey> {
    any::<(u8, u32, u64)>().prop_map(|(link_number, rkey, address)| LinkRkey {
        link_number,
        rkey: Rkey(rkey),
        address,
    })
}

fn confirm_rkey(most: u8) -> impl Strategy<Value = ConfirmRkey> {
    (any::<(bool, bool, bool, u32, u64)>(), 0..=most, vec(link_rkey(), 2)).prop_map(
        |((reply, negative, retry, rkey, address), other_links, others)| ConfirmRkey {
            reply,
            negative,
            retry,
            other_links,
            rkey: Rkey(rkey),
            address,
            others: List::from_slice(&others[..usize::from(other_links.min(2))]).unwrap(),
        },
    )
}

fn v1_message() -> impl Strategy<Value = llc::Message> {
    use llc::Message::*;
    let add_link_cont = (any::<(bool, u8, u8)>(), vec(rkey_pair(), 2)).prop_map(
        |((reply, link_number, left), rkeys)| llc::AddLinkCont {
            reply,
            link_number,
            left,
            rkeys: List::from_slice(&rkeys[..usize::from(left.min(2))]).unwrap(),
        },
    );
    let confirm_rkey_cont = (any::<(bool, bool, u8)>(), vec(link_rkey(), 3)).prop_map(
        |((reply, negative, left), entries)| llc::ConfirmRkeyCont {
            reply,
            negative,
            left,
            entries: List::from_slice(&entries[..usize::from(left.min(3))]).unwrap(),
        },
    );
    let delete_rkey = (any::<(bool, bool, u8)>(), vec(any::<u32>().prop_map(Rkey), 1..=8))
        .prop_map(|((reply, negative, error_mask), rkeys)| llc::DeleteRkey {
            reply,
            negative,
            error_mask,
            rkeys,
        });
    prop_oneof![
        confirm_link(false).prop_map(ConfirmLink),
        add_link(false).prop_map(AddLink),
        add_link_cont.prop_map(AddLinkCont),
        delete_link().prop_map(DeleteLink),
        confirm_rkey(8).prop_map(ConfirmRkey),
        confirm_rkey_cont.prop_map(ConfirmRkeyCont),
        delete_rkey.prop_map(DeleteRkey),
        test_link().prop_map(TestLink),
    ]
}

fn delete_link() -> impl Strategy<Value = llc::DeleteLink> {
    any::<(bool, bool, bool, u8, u32)>().prop_map(|(reply, all, orderly, link_number, reason)| {
        let reason = DeleteReason(reason);
        llc::DeleteLink { reply, all, orderly, link_number, reason }
    })
}

fn test_link() -> impl Strategy<Value = llc::TestLink> {
    any::<(bool, [u8; 16])>().prop_map(|(reply, data)| llc::TestLink { reply, data })
}

fn v2_message() -> impl Strategy<Value = llc::Message> {
    use llc::Message::*;
    let rejected = prop::option::of((0..16_u8).prop_map(RejectReason));
    let request_add_link = prop_oneof![
        gid_list().prop_map(llc::RequestAddLink::Request),
        rejected.prop_map(llc::RequestAddLink::Reply),
    ];
    let delete_rkey = vec(any::<u32>().prop_map(Rkey), 1..=255)
        .prop_map(|rkeys| llc::DeleteRkey { rkeys, ..llc::DeleteRkey::default() });
    let delete_rkey_reply = (any::<(bool, u8, u8)>(), vec(any::<u32>().prop_map(Rkey), 8))
        .prop_map(|((negative, count, not_deleted), rkeys)| {
            let listed = if negative { usize::from(not_deleted.min(8)) } else { 0 };
            let rkeys = List::from_slice(&rkeys[..listed]).unwrap();
            llc::DeleteRkeyReply { negative, count, not_deleted, rkeys }
        });
    prop_oneof![
        confirm_link(true).prop_map(ConfirmLink),
        add_link(true).prop_map(AddLink),
        delete_link().prop_map(DeleteLink),
        request_add_link.prop_map(RequestAddLink),
        confirm_rkey(2).prop_map(ConfirmRkey),
        delete_rkey.prop_map(DeleteRkey),
        delete_rkey_reply.prop_map(DeleteRkeyReply),
        test_link().prop_map(TestLink),
    ]
}

pub(super) fn llc() -> impl Strategy<Value = Llc> {
    prop_oneof![
        v1_message().prop_map(|message| Llc { version: Version::V1, message }),
        v2_message().prop_map(|message| Llc { version: Version::V2, message }),
    ]
}

pub(super) fn cdc() -> impl Strategy<Value = Cdc> {
    any::<(u16, u32, (u16, u32), (u16, u32), u8, u8)>().prop_map(
        |(sequence, token, producer, consumer, producer_flags, state_flags)| Cdc {
            sequence,
            token,
            producer: Cursor::new(producer.0, producer.1),
            consumer: Cursor::new(consumer.0, consumer.1),
            producer_flags: ProducerFlags::from_bits_truncate(producer_flags),
            state_flags: StateFlags::from_bits_truncate(state_flags),
        },
    )
}

pub(super) fn record() -> impl Strategy<Value = Record> {
    let reason = prop::sample::select(&Reason::ALL[..]);
    let flags =
        prop::sample::select(&[0x80, 0x40, 0xc0][..]).prop_map(StateFlags::from_bits_truncate);
    let length = 1..=MAX_DATA;
    prop_oneof![
        (any::<u64>(), reason, any::<bool>()).prop_map(|(at, reason, more)| Record::Leave {
            at,
            reason,
            more
        }),
        any::<u64>().prop_map(|at| Record::Received { at }),
        any::<u64>().prop_map(|at| Record::Change { at }),
        (0..=u64::MAX - u64::from(MAX_DATA), length, any::<bool>())
            .prop_map(|(at, len, more)| Record::Data { at, len, more }),
        (any::<u64>(), flags).prop_map(|(at, flags)| Record::End { at, flags }),
        any::<u64>().prop_map(|at| Record::Urgent { at }),
        (12..=MAX_CLC).prop_map(|len| Record::Clc { len }),
    ]
}
