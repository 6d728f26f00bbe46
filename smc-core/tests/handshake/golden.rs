// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages captured from Linux, and this side's reaction.

use smc_core::handshake::{
    ClientStep, Config, ConfirmStep, DeclineCode, DeclineReason, IsmDevice, Selection, ServerStep,
};
use smc_core::wire::ids::{Chid, DmbToken, Features, Gid, LinkId, OsType, Release, SizeCode};

use crate::support::*;

const LOOPBACK_1: &str = "f6d0053b4904446f 934f97c2936239e7";
const LOOPBACK_2: &str = "3f31e22cf0fe4ebf 8cb6e7fb5fa4373b";

fn gid(text: &str) -> Gid {
    Gid(hex(text).try_into().unwrap())
}

/// A Proposal of SMC-R and SMC-D, release v2.1, with one UEID and the loopback device.
fn linux_proposal() -> Vec<u8> {
    let mut bytes = hex("e2d4c3d9 0100e02e");
    bytes.extend([0; 8 + 16 + 6 + 2]); // peer id, GID, MAC, subnet offset
    bytes.extend([0; 8 + 2]); // associated ISM device
    bytes.extend(hex("001c"));
    bytes.extend([0; 8 + 20]); // vendor, reserved
    bytes.extend(hex("01 02 00 10 0000 0040"));
    bytes.extend(hex("00000000000000000000 ffff 0a090002")); // RoCE GID 10.9.0.2
    bytes.extend(hex("ff 02 0001"));
    bytes.extend([0; 12]);
    bytes.extend(blank_padded("SMCPROBE-EID1"));
    bytes.extend([0; 32 + 16]); // SEID, reserved
    bytes.extend(hex("f6d0053b4904446f ffff 934f97c2936239e7 ffff"));
    bytes.extend(hex("e2d4c3d9"));
    assert_eq!(bytes.len(), 224);
    bytes
}

/// The same with a virtio-ism device in place of the loopback device.
fn linux_proposal_on_virtio() -> Vec<u8> {
    let mut bytes = linux_proposal();
    bytes[208..210].copy_from_slice(&[0xff, 0x01]);
    bytes[218..220].copy_from_slice(&[0xff, 0x01]);
    bytes
}

/// The answering first contact Accept of SMC-Dv2, for an EID of the same host.
fn linux_accept() -> Vec<u8> {
    let mut bytes = hex("e2d4c3c4 02008229 3f31e22cf0fe4ebf 4a431356208c140a 00 20 0000");
    bytes.extend(hex("00010000 ffff"));
    bytes.extend(blank_padded("SMCPROBE-EID1"));
    bytes.extend(hex("8cb6e7fb5fa4373b 00 21 0000"));
    bytes.extend(blank_padded("(none)"));
    bytes.extend(hex("0000 0001 00000000 0000000000000000 e2d4c3c4"));
    assert_eq!(bytes.len(), 130);
    bytes
}

fn probe(device: IsmDevice) -> Config {
    let mut config = host(7);
    config.ueids = vec![eid("OTHER"), eid("SMCPROBE-EID1")];
    config.devices = vec![device];
    config
}

fn loopback(text: &str) -> Config {
    probe(IsmDevice { chid: Chid::LOOPBACK, gid: gid(text) })
}

fn check_selection(selection: &Selection) {
    assert_eq!(selection.eid(), eid("SMCPROBE-EID1"));
    assert_eq!(selection.terms().release, Release::V2_1);
    assert_eq!(selection.terms().features, Features::EMULATED_ISM);
    let refused = selection.rejected();
    assert!(matches!(refused.smcr_v2, Some(DeclineReason::NotConfigured(_))));
    assert_eq!((refused.smcd_v2, refused.smcr_v1, refused.smcd_v1), (None, None, None));
}

// Shows: CLCV2-96.
#[test]
fn linux_proposal_of_both_types_is_served_by_smc_d() {
    let selection = eligible(&loopback(LOOPBACK_1), &linux_proposal());
    check_selection(&selection);
    assert_eq!(selection.candidates()[0].peer, gid(LOOPBACK_1));

    let server = probe(emulated(0xff01, 7));
    let selection = eligible(&server, &linux_proposal_on_virtio());
    check_selection(&selection);
    let found = selection.candidates()[0];
    assert_eq!((found.chid, found.peer), (Chid(0xff01), gid(LOOPBACK_1)));
    let (_, accept) = accept(selection, None);
    assert_eq!((accept.len(), accept[7]), (130, 0x29));
    assert_eq!(accept[34..66], blank_padded("SMCPROBE-EID1"));
}

// Shows: CLCV2-77, CLCV2-80.
#[test]
fn linux_proposal_from_another_host_is_declined_on_loopback() {
    let ServerStep::Decline(sent) = receive(&loopback(LOOPBACK_2), &linux_proposal()) else {
        panic!()
    };
    assert_eq!(sent.reason, DeclineReason::ForeignLoopback);
    let mut expected = hex("e2d4c3d9 04002c20");
    expected.extend([7; 8]); // peer id
    // Diagnosis, Linux; then SMC-Dv2, SMC-Dv1, SMC-Rv2, SMC-Rv1.
    expected.extend(hex("03030007 20000000 03030007 00000000 03030002 00000000 e2d4c3d9"));
    assert_eq!(sent.message, expected);
}

// Shows: CLCV2-34.
#[test]
fn linux_proposal_of_smc_rv1_and_smc_dv2_is_served_by_smc_d() {
    let mut bytes = linux_proposal_on_virtio();
    bytes[7] = 0x24; // version 2: SMC-D; version 1: SMC-R
    bytes[38..40].copy_from_slice(&hex("0028"));
    bytes[50..52].copy_from_slice(&hex("0024"));
    bytes.splice(80..80, hex("0a090000 18 0000 00"));
    let length = u16::try_from(bytes.len()).unwrap();
    bytes[5..7].copy_from_slice(&length.to_be_bytes());
    let selection = eligible(&probe(emulated(0xff01, 7)), &bytes);
    assert!(matches!(selection.rejected().smcr_v1, Some(DeclineReason::NotConfigured(_))));
    accept(selection, None);
}

// Shows: EID-15.
#[test]
fn linux_accept_of_first_contact_is_taken() {
    let client = loopback(LOOPBACK_2);
    let (awaits_accept, _) = propose(&client);
    let accepted = offered(awaits_accept, &linux_accept(), None);
    assert!(accepted.first_contact());
    assert_eq!(accepted.devices().peer, gid(LOOPBACK_2));
    assert_eq!(accepted.peer().token, DmbToken(0x4a43_1356_208c_140a));
    assert_eq!(accepted.peer().size, SizeCode::new(2).unwrap());
    assert_eq!(accepted.peer_link(), LinkId([0, 1, 0, 0]));
    let host = accepted.peer_host().unwrap();
    assert_eq!((host.os, host.hostname.text()), (OsType::LINUX, None));

    let (established, confirm) = accepted.confirm(client_dmbe(), CLIENT_LINK);
    assert_eq!(established.terms.features, Features::EMULATED_ISM);
    let mut expected = hex("e2d4c3c4 03008229 3f31e22cf0fe4ebf 0000000000001111 00 00 0000");
    expected.extend(hex("00000001 ffff"));
    expected.extend(blank_padded("SMCPROBE-EID1"));
    expected.extend(hex("8cb6e7fb5fa4373b 00 21 0000"));
    expected.extend([b' '; 32]);
    expected.extend(hex("0000 0001 00000000 0000000000000000 e2d4c3c4"));
    assert_eq!(confirm, expected);
}

#[test]
fn linux_accept_of_subsequent_contact_is_taken_from_a_known_peer() {
    let client = loopback(LOOPBACK_2);
    let mut later = linux_accept();
    later.drain(74..126);
    later[6] = 78;
    later[7] = 0x21;
    let (awaits_accept, _) = propose(&client);
    let (first, _) =
        offered(awaits_accept.clone(), &linux_accept(), None).confirm(client_dmbe(), CLIENT_LINK);
    let accepted = offered(awaits_accept, &later, Some(first.terms));
    let (established, confirm) = accepted.confirm(client_dmbe(), CLIENT_LINK);
    assert!(!established.first_contact);
    assert_eq!((confirm.len(), confirm[7]), (78, 0x21));
}

#[test]
fn linux_confirm_is_taken() {
    let server = probe(emulated(0xff01, 7));
    let (server, accept) = accept(eligible(&server, &linux_proposal_on_virtio()), None);
    // Linux repeats CHID, EID, flag and release and sends the common features.
    let mut confirm = accept;
    confirm[4] = 3;
    confirm[8..16].copy_from_slice(&hex("f6d0053b4904446f"));
    confirm[66..74].copy_from_slice(&hex("934f97c2936239e7"));
    confirm[28..32].copy_from_slice(&hex("00020000"));
    let ConfirmStep::Established(established) = server.handle(&confirm) else { panic!() };
    assert_eq!(established.peer_link, LinkId([0, 2, 0, 0]));
    assert_eq!(established.devices.peer, gid(LOOPBACK_1));
}

// Shows: CLC-51, CLCV2-82.
#[test]
fn linux_declines_are_understood_by_both_roles() {
    let zeros8 = "0000000000000000";
    let v2 =
        hex(&format!("e2d4c3d9 04002c20 {zeros8} 03030008 20000000 {zeros8}{zeros8} e2d4c3d9"));
    let v1 = hex(&format!("e2d4c3d9 04001c10 {zeros8} 03030000 00000000 e2d4c3d9"));
    let mut short_v2 = v1.clone();
    short_v2[7] = 0x20;
    let mut sync = v2.clone();
    sync[7] = 0x28;
    sync[16..20].copy_from_slice(&hex("04000000"));
    for (bytes, code, out_of_sync) in [
        (v2, DeclineCode::NoUeid, false),
        (v1, DeclineCode::NoSmcDevice, false),
        (short_v2, DeclineCode::NoSmcDevice, false),
        (sync, DeclineCode::OutOfSync, true),
    ] {
        let (client, proposal) = propose(&client_host());
        let ClientStep::PeerDeclined(peer) = client.handle(&bytes, |_, _| None) else { panic!() };
        assert_eq!((peer.code, peer.out_of_sync), (code, out_of_sync));
        let ServerStep::PeerDeclined(peer) = receive(&server_host(), &bytes) else { panic!() };
        assert_eq!(peer.code, code);
        let (server, _) = accept(eligible(&server_host(), &proposal), None);
        let ConfirmStep::PeerDeclined(peer) = server.handle(&bytes) else { panic!() };
        assert_eq!((peer.code, peer.out_of_sync), (code, out_of_sync));
    }
}

#[test]
fn rfc_7609_proposal_is_declined_in_version_1() {
    let mut bytes = hex("e2d4c3d9 01003410");
    bytes.extend([5; 8 + 16 + 6]);
    bytes.extend(hex("0000 0a090000 18 0000 00 e2d4c3d9"));
    assert_eq!(bytes.len(), 52);
    let ServerStep::Decline(sent) = receive(&server_host(), &bytes) else { panic!() };
    let mut expected = hex("e2d4c3d9 04001c10");
    expected.extend([2; 8]);
    expected.extend(hex("03030002 00000000 e2d4c3d9"));
    assert_eq!(sent.message, expected);
}
