// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Both roles against each other, in every relevant combination.

use smc_core::handshake::{Config, IsmDevice, Terms};
use smc_core::wire::clc::Message;
use smc_core::wire::ids::{Chid, Features, Hostname, OsType, Release};

use crate::support::*;

const V2_1: Terms =
    Terms { release: Release::V2_1, features: Features::EMULATED_ISM, carriers: None };

#[derive(Clone, Copy, Debug)]
enum Names {
    Seid,
    Ueid,
    Both,
}

fn named(n: u8, names: Names) -> Config {
    let mut config = host(n);
    config.seid = Some(eid("SYSTEM")).filter(|_| !matches!(names, Names::Ueid));
    config.ueids.retain(|_| !matches!(names, Names::Seid));
    config
}

/// {v2.0, v2.1} of both ends x {first, subsequent} x {SEID, UEID, both} x 1 to 8 platform devices.
// Shows: CLC-26, CLCV2-27, CLCV2-37, CLCV2-38, CLCV2-44, CLCV2-49, CLCV2-63, CLCV2-65, CLCV2-66.
// Shows: CLCV2-86, CLCV2-93, EID-12, RMB-32.
#[test]
fn every_release_contact_eid_and_number_of_devices() {
    for client_release in [Release::V2_0, Release::V2_1] {
        for server_release in [Release::V2_0, Release::V2_1] {
            for names in [Names::Seid, Names::Ueid, Names::Both] {
                for count in 1..=8_u16 {
                    let mut client = named(1, names);
                    let mut server = named(2, names);
                    client.release = client_release;
                    server.release = server_release;
                    client.devices = (1..=count).map(|chid| platform(chid, 1)).collect();
                    // Only the last device is on a common fabric.
                    server.devices = vec![platform(count, 2), platform(99, 2)];

                    let release = client_release.min(server_release);
                    let features = match release {
                        Release::V2_1 => Features::EMULATED_ISM,
                        _ => Features::empty(),
                    };
                    let first = run(&client, &server, Memory::default());
                    assert!(first.client.first_contact);
                    assert_eq!(first.client.terms, Terms { release, features, carriers: None });
                    assert_eq!(first.client.devices.chid, Chid(count));
                    let length = if release == Release::V2_1 { 130 } else { 114 };
                    assert_eq!((first.accept.len(), first.confirm.len()), (length, length));
                    assert_eq!((first.accept[7], first.confirm[7]), (0x29, 0x29));
                    let expected =
                        if matches!(names, Names::Ueid) { eid("LAB") } else { eid("SYSTEM") };
                    assert_eq!(first.client.eid, expected);

                    let terms = Some(first.client.terms);
                    let memory = Memory { client: terms, server: terms };
                    let second = run(&client, &server, memory);
                    assert!(!second.client.first_contact);
                    assert_eq!(second.client.terms, first.client.terms);
                    assert_eq!((second.accept.len(), second.confirm.len()), (78, 78));
                    assert_eq!((second.accept[7], second.confirm[7]), (0x21, 0x21));
                    assert_eq!(second.client.peer_host, None);
                }
            }
        }
    }
}

// Shows: CLCV2-91, EID-18.
#[test]
fn one_to_four_emulated_devices() {
    for count in 1..=4_u16 {
        let mut client = client_host();
        let mut server = server_host();
        client.devices = (0..count).map(|i| emulated(VIRTIO + i, 1)).collect();
        server.devices = vec![emulated(VIRTIO + count - 1, 2)];
        for names in [Names::Seid, Names::Ueid, Names::Both] {
            client.seid = named(1, names).seid;
            client.ueids = named(1, names).ueids;
            server.seid = client.seid;
            server.ueids = client.ueids.clone();
            let first = run(&client, &server, Memory::default());
            assert_eq!(first.client.devices.chid, Chid(VIRTIO + count - 1));
            assert_eq!(first.client.terms, V2_1);
            run(&client, &server, Memory { client: Some(V2_1), server: Some(V2_1) });
        }
    }
}

// Shows: EISM-26.
#[test]
fn real_and_emulated_devices_in_one_offer() {
    let mut client = client_host();
    client.devices = vec![platform(5, 1), emulated(0xffff, 1), emulated(VIRTIO, 1)];
    for (device, chid) in [(platform(5, 2), 5), (emulated(VIRTIO, 2), VIRTIO)] {
        let mut server = server_host();
        server.devices = vec![emulated(0xffff, 2), device];
        assert_eq!(run(&client, &server, Memory::default()).client.devices.chid, Chid(chid));
    }
}

// Shows: EISM-25.
#[test]
fn loopback_within_one_host() {
    let mut config = client_host();
    config.devices = vec![emulated(0xffff, 9)];
    let run = run(&config, &config, Memory::default());
    assert_eq!(run.client.devices.local, run.client.devices.peer);
}

// Shows: CLC-1, CLC-9.
#[test]
fn every_proposal_of_a_host_is_the_same() {
    let client = client_host();
    assert_eq!(propose(&client).1, propose(&client).1);
}

// Shows: EISM-11, EISM-12, EISM-18, EISM-19.
#[test]
fn extended_gids_travel_in_two_halves_in_all_messages() {
    let mut client = client_host();
    client.devices[0].gid.0[15] = 0xaa;
    let mut server = server_host();
    server.devices[0].gid.0[15] = 0xbb;
    let (_, proposal) = propose(&client);
    let run = run(&client, &server, Memory::default());
    // SMC-Dv2 extension behind the base (80), the V2 extension (40) and one EID (32).
    let entries = &proposal[80 + 40 + 32 + 48..][..20];
    assert_eq!(entries[..10], [1, 1, 1, 1, 1, 1, 1, 1, 0xff, 0x01]);
    assert_eq!(entries[10..], [1, 1, 1, 1, 1, 1, 1, 0xaa, 0xff, 0x01]);
    assert_eq!(proposal[81], 2, "the count counts entries");
    assert_eq!(run.accept[8..16], [2; 8]);
    assert_eq!(run.accept[66..74], [2, 2, 2, 2, 2, 2, 2, 0xbb]);
    assert_eq!(run.confirm[8..16], [1; 8]);
    assert_eq!(run.confirm[66..74], [1, 1, 1, 1, 1, 1, 1, 0xaa]);
    assert_eq!(run.accept[32..34], [0xff, 0x01]);
    assert_eq!(run.confirm[32..34], [0xff, 0x01]);
}

// Shows: EISM-20.
#[test]
fn platform_devices_leave_the_second_half_zero() {
    let mut client = client_host();
    client.devices = vec![platform(5, 1)];
    let mut server = server_host();
    server.devices = vec![platform(5, 2)];
    let run = run(&client, &server, Memory::default());
    assert_eq!(run.accept[66..74], [0; 8]);
    assert_eq!(run.confirm[66..74], [0; 8]);
}

// Shows: CLCV2-13, CLCV2-24, CLCV2-25, CLCV2-41, CLCV2-95, EISM-4, EISM-5.
#[test]
fn smc_d_proposal_keeps_the_fields_of_other_types_zero() {
    let (_, proposal) = propose(&client_host());
    assert_eq!(proposal[7], 0x26);
    assert_eq!(proposal[8..16], [1; 8], "the peer id is sent");
    assert_eq!(proposal[40..50], [0; 10], "no associated device");
    assert_eq!(proposal[52..60], [0; 8], "no vendor options");
    assert_eq!(proposal[80 + 3], 0x10, "release v2.1, no SEID");
    assert_eq!(proposal[80 + 24..80 + 28], [0, 0, 0, 1], "no limits, the feature");
}

/// Proposal = the client's features, Accept = the server's, Confirm = the common ones.
// Shows: CLCV2-15, CLCV2-24, CLCV2-40, CLCV2-42, CLCV2-61, CLCV2-94, EISM-1, EISM-24.
#[test]
fn feature_mask_of_each_message() {
    for client_has in [false, true] {
        for server_has in [false, true] {
            let mut client = client_host();
            let mut server = server_host();
            client.devices = vec![platform(5, 1)];
            server.devices = vec![platform(5, 2)];
            let mask = |has: bool| if has { Features::EMULATED_ISM } else { Features::empty() };
            client.features = mask(client_has);
            server.features = mask(server_has);
            let (_, proposal) = propose(&client);
            let run = run(&client, &server, Memory::default());
            assert_eq!(proposal[80 + 26..80 + 28], [0, u8::from(client_has)]);
            assert_eq!(run.accept[112..114], [0, u8::from(server_has)]);
            assert_eq!(run.confirm[112..114], [0, u8::from(client_has && server_has)]);
            for message in [&run.accept, &run.confirm] {
                assert_eq!(message[110..112], [0; 2], "limits are of SMC-R");
                assert_eq!(message[114..126], [0; 12], "no vendor options");
            }
            assert_eq!(run.client.terms.features, mask(client_has && server_has));
        }
    }
}

// Shows: CLCV2-40, CLCV2-47, CLCV2-51, CLCV2-53.
#[test]
fn each_side_learns_the_others_host_at_first_contact() {
    let mut client = client_host();
    client.hostname = Hostname::new("client.example").unwrap();
    client.os = OsType::AIX;
    let mut server = server_host();
    server.hostname = Hostname::new(&"s".repeat(33)).unwrap();
    let run = run(&client, &server, Memory::default());
    let (at_client, at_server) = (run.client.peer_host.unwrap(), run.server.peer_host.unwrap());
    assert_eq!(at_client.hostname.text(), Some("s".repeat(32).as_str()));
    assert_eq!(at_server.hostname.text(), Some("client.example"));
    assert_eq!((at_client.os, at_server.os), (OsType::LINUX, OsType::AIX));
}

// Shows: CLCV2-52.
#[test]
fn a_hostname_that_is_none_fails_nothing() {
    let mut client = client_host();
    client.hostname = Hostname::from_wire([0x07; 32]);
    let run = run(&client, &server_host(), Memory::default());
    assert_eq!(run.server.peer_host.unwrap().hostname.text(), None);
}

// Shows: CLC-20, CLC-26, CLCV2-48.
#[test]
fn server_may_begin_anew_with_a_peer_the_client_knows() {
    let memory = Memory { client: Some(V2_1), server: None };
    assert!(run(&client_host(), &server_host(), memory).client.first_contact);
}

/// The terms of the first contact hold for as long as the ends know each other.
// Shows: CLCV2-50.
#[test]
fn subsequent_contact_keeps_the_terms_of_the_first() {
    let mut client = client_host();
    let mut server = server_host();
    client.devices = vec![platform(5, 1)];
    server.devices = vec![platform(5, 2)];
    let old = Some(Terms { release: Release::V2_0, features: Features::empty(), carriers: None });
    let run = run(&client, &server, Memory { client: old, server: old });
    assert_eq!((Some(run.client.terms), Some(run.server.terms)), (old, old));
}

#[test]
fn server_takes_the_candidate_the_caller_names() {
    let mut client = client_host();
    let mut server = server_host();
    client.devices = vec![emulated(VIRTIO, 1), platform(5, 1)];
    server.devices = vec![emulated(VIRTIO, 2), platform(5, 2)];
    let (awaits_accept, proposal) = propose(&client);
    let selection = eligible(&server, &proposal);
    let chids: Vec<Chid> = selection.candidates().iter().map(|found| found.chid).collect();
    assert_eq!(chids, [Chid(VIRTIO), Chid(5)]);
    let unreachable_first = selection.candidates()[1];
    let (_, accept) = selection.accept(unreachable_first, None, server_dmbe(), SERVER_LINK, NOW);
    assert_eq!(offered(awaits_accept, &accept, None).devices().chid, Chid(5));
}

// Shows: CLCV2-45.
#[test]
fn an_extension_without_the_flag_is_tolerated_and_ignored() {
    let (client, proposal) = propose(&client_host());
    let (_, accept) = accept(eligible(&server_host(), &proposal), None);
    let mut stray = accept;
    stray[7] &= !0x08;
    stray[75] = 0x2f; // release 15
    let accepted = offered(client, &stray, Some(V2_1));
    assert!(!accepted.first_contact());
    assert_eq!(accepted.terms(), V2_1);
    assert_eq!(accepted.peer_host(), None);
}

// Shows: CLC-6.
#[test]
fn proposals_of_later_versions_and_releases_are_served() {
    let (client, mut proposal) = propose(&client_host());
    proposal[7] = 0x56; // version 5
    proposal[83] = 0xe0; // release 14
    let (_, accept) = accept(eligible(&server_host(), &proposal), None);
    let Ok(Message::AcceptD2(parsed)) = Message::parse(&accept) else { panic!() };
    assert_eq!(parsed.first_contact.unwrap().release, Release::V2_1);
    offered(client, &accept, None);
}

// Shows: CLC-4, CLCV2-5.
#[test]
fn reserved_bits_of_a_proposal_are_not_looked_at() {
    let (_, proposal) = propose(&client_host());
    // Reserved areas of base, V2 extension and SMC-Dv2 extension.
    for range in [60..80, 82..83, 84..86, 80 + 28..80 + 40, 152 + 32..152 + 48] {
        let mut odd = proposal.clone();
        odd[range.clone()].fill(0xff);
        eligible(&server_host(), &odd);
    }
    // MAC, RoCE GID, limits: fields of types not offered.
    for range in [8..38, 80 + 8..80 + 26] {
        let mut odd = proposal.clone();
        odd[range.clone()].fill(0xff);
        eligible(&server_host(), &odd);
    }
}

#[test]
fn the_same_host_name_or_peer_id_at_both_ends_is_no_obstacle() {
    let mut server = server_host();
    server.peer_id = client_host().peer_id;
    run(&client_host(), &server, Memory::default());
}

#[test]
fn devices_may_share_a_gid_across_fabrics() {
    let mut client = client_host();
    client.devices = vec![IsmDevice { chid: Chid(VIRTIO + 1), ..client.devices[0] }];
    let mut server = server_host();
    server.devices.push(emulated(VIRTIO + 1, 2));
    assert_eq!(run(&client, &server, Memory::default()).client.devices.chid, Chid(VIRTIO + 1));
}
